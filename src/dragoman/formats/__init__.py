"""The syntaxes in which models write thoughts and tool calls: one file per family, one line in this table.

A format only declares markers and how a call's text becomes name and arguments; reading is done in `stages`.
"""

from dragoman.core.errors import ConfigError
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
from dragoman.formats.json import JSON
from dragoman.formats.kimi import KIMI
from dragoman.formats.llama3 import LLAMA3
from dragoman.formats.minimax import MINIMAX
from dragoman.formats.mistral import MISTRAL, MISTRAL_ARRAY
from dragoman.formats.phi import PHI
from dragoman.formats.plain import PLAIN
from dragoman.formats.pythonic import PYTHONIC
from dragoman.formats.qwen_xml import QWEN_XML
from dragoman.formats.syntax import ModelFormat

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
"""In the order in which a template is searched for their signs: what is more particular comes first."""

FALLBACK = JSON.name


def named(name: str) -> ModelFormat:
    """The format that an operator asks for."""
    if name not in FORMATS:
        raise ConfigError(f"there is no format {name!r}; formats: {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


def detect(template: str | None, model: str = "") -> str:
    """The name of the format that a chat template speaks, or that a model of this name, or one that the template names,
    is known for."""
    for known in FORMATS.values():
        if template and any(all(sign in template for sign in group) for group in known.signs):
            return known.name
    # A file has its model's name, a folder may be called anything; the template often says who is speaking.
    said = f"{model}\n{template or ''}".lower()
    families = (known for known in FORMATS.values() if any(name in said for name in known.families))
    return next((known.name for known in families), FALLBACK)
