"""Calls that must be made end when one repeats the one before it word for word: a weak model would never end."""


class Sections:
    """The calls of a reply, as they were written."""

    def __init__(self) -> None:
        self.last = ""
        self.parts: list[str] = []

    def repeats(self, text: str, ends: bool) -> bool:
        """Whether a call is the same as the one before; `ends`: the reply might end behind this text."""
        self.parts.append(text)
        if not ends:
            return False
        section, self.parts = "".join(self.parts).strip(), []
        repeated = section != "" and section == self.last
        self.last = section or self.last
        return repeated
