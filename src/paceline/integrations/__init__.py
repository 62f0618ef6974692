"""Paceline inside other people's trainers."""
