"""A host's own worker extension, as every trainer has one; vLLM loads it by name in its processes."""


class HostExtension:
    def theirs(self) -> str:
        """Tell that the host's own methods are there."""
        return "still here"
