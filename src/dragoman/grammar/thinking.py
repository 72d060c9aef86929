"""What a thought begins and ends with, in tags or on a channel."""

from dragoman.formats.syntax import ModelFormat, Tags


def thoughts(syntax: ModelFormat) -> tuple[Tags, ...]:
    """The pairs of texts around a thought; a channel's are what switches to it and away from it."""
    channels = syntax.channels
    if channels is None:
        return syntax.thoughts
    if channels.message:
        return (Tags(f"{channels.open}{channels.hidden[1]}{channels.message}", channels.ends[0]),)
    end = channels.ends[0] if channels.ends else f"{channels.open}final"
    return (*syntax.thoughts, Tags(f"{channels.open}{channels.hidden[0]}", end))


def closing(syntax: ModelFormat, tags: Tags) -> str:
    """What ends a thought in its midst, so that the model goes on with the answer."""
    channels = syntax.channels
    if channels is not None and channels.message:
        return f"{tags.close}{channels.start}assistant"
    return f"\n{tags.close}\n\n"
