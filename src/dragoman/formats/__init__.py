"""The syntaxes in which models write reasoning and tool calls: one module per kind of call, and the table of formats.

A format only declares markers and call syntaxes. `pipeline` reads replies with it, `grammar` constrains them.
"""

from functools import lru_cache

from dragoman.core.errors import ConfigError
from dragoman.core.plugins import find_plugin
from dragoman.formats.bare_json import JSON, LLAMA3
from dragoman.formats.gemma import FUNCTION_GEMMA, GEMMA
from dragoman.formats.harmony import CHANNEL, HARMONY
from dragoman.formats.named_json import DEEPSEEK, DEEPSEEK_V3, KIMI, MISTRAL, MISTRAL_ARRAY
from dragoman.formats.parameter_tags import DEEPSEEK_DSML, GLM, MINIMAX, QWEN_XML
from dragoman.formats.pythonic import PYTHONIC
from dragoman.formats.syntax import PLAIN, ModelFormat
from dragoman.formats.tagged_json import COHERE, ERNIE, GRANITE, HERMES, HUNYUAN, INTERNLM, PHI

FORMATS: dict[str, ModelFormat] = {
    known.name: known
    for known in (
        *(DEEPSEEK_DSML, DEEPSEEK_V3, DEEPSEEK, KIMI, MINIMAX, GLM, QWEN_XML, GEMMA, FUNCTION_GEMMA, HARMONY, CHANNEL),
        *(MISTRAL, MISTRAL_ARRAY, COHERE, GRANITE, PHI, INTERNLM, PYTHONIC, LLAMA3, HUNYUAN, ERNIE, HERMES),
        *(JSON, PLAIN),
    )
}
"""In the order of detection: more specific formats come first."""

FALLBACK = JSON.name


def get_format(name: str) -> ModelFormat:
    """Return a format of the table, of an entry point, or for `module:NAME`."""
    found = FORMATS.get(name)
    return found or _find_plugin_format(name)


@lru_cache(maxsize=64)
def _find_plugin_format(name: str) -> ModelFormat:
    found = find_plugin("format", name, dict.fromkeys(sorted(FORMATS), ""))
    if not isinstance(found, ModelFormat):
        raise ConfigError(f"format {name!r}: it is not a ModelFormat")
    return found


def detect_format(template: str | None, model: str = "") -> str:
    """Return the name of the format of a chat template, or of a model family named in the model's name or the
    template."""
    for known in FORMATS.values():
        if template and any(all(sign in template for sign in group) for group in known.template_markers):
            return known.name
    # A directory may have any name, but the template often names the model.
    names = f"{model}\n{template or ''}".lower()
    families = (known for known in FORMATS.values() if any(name in names for name in known.families))
    return next((known.name for known in families), FALLBACK)
