"""Faults planted on purpose, to show that certify, doctor and fingerprints find them."""
