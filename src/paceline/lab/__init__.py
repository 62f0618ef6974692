"""What is not needed to use Paceline: the arena, benches and the engines that they drive."""


def register() -> None:
    """Make the arena's names known to sessions. The command line calls this where the lab is installed."""
    from paceline.lab.arena.workload import ArenaWorkload
    from paceline.sessions import workloads

    workloads.register("arena", ArenaWorkload())
