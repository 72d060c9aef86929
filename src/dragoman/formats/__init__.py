"""The syntaxes in which models write reasoning and tool calls: one module per family, and the table of all formats.

A format only declares markers and call syntaxes. `pipeline` reads replies with it, `grammar` constrains them.
"""

from dragoman.core.errors import ConfigError
from dragoman.formats.bare_json import JSON
from dragoman.formats.channel import CHANNEL
from dragoman.formats.cohere import COHERE
from dragoman.formats.deepseek import DEEPSEEK, DEEPSEEK_DSML, DEEPSEEK_V3
from dragoman.formats.ernie import ERNIE
from dragoman.formats.gemma import FUNCTION_GEMMA, GEMMA
from dragoman.formats.glm import GLM
from dragoman.formats.granite import GRANITE
from dragoman.formats.harmony import HARMONY
from dragoman.formats.hermes import HERMES
from dragoman.formats.hunyuan import HUNYUAN
from dragoman.formats.internlm import INTERNLM
from dragoman.formats.kimi import KIMI
from dragoman.formats.llama3 import LLAMA3
from dragoman.formats.minimax import MINIMAX
from dragoman.formats.mistral import MISTRAL, MISTRAL_ARRAY
from dragoman.formats.phi import PHI
from dragoman.formats.pythonic import PYTHONIC
from dragoman.formats.qwen_xml import QWEN_XML
from dragoman.formats.syntax import PLAIN, ModelFormat

FORMATS: dict[str, ModelFormat] = {
    known.name: known
    for known in (
        *(DEEPSEEK_DSML, DEEPSEEK_V3, DEEPSEEK, KIMI, MINIMAX, GLM, QWEN_XML, GEMMA, FUNCTION_GEMMA, HARMONY, CHANNEL),
        *(
            MISTRAL,
            MISTRAL_ARRAY,
            COHERE,
            GRANITE,
            PHI,
            INTERNLM,
            PYTHONIC,
            LLAMA3,
            HUNYUAN,
            ERNIE,
            HERMES,
            JSON,
            PLAIN,
        ),
    )
}
"""In the order of detection: more specific formats come first."""

FALLBACK = JSON.name


def get_format(name: str) -> ModelFormat:
    """Return the format with this name."""
    if name not in FORMATS:
        raise ConfigError(f"unknown format {name!r}; available: {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


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
