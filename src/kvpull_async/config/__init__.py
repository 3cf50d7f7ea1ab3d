"""Configuration: what callers set (LLMConfig), and what the engine runs on (the frozen Settings).

The only reader of option strings, and of the environment but for KVPULL_NO_EXTENSION, which decides at import which
copies are used (``memory.copying``). It opens nothing but the file that holds the link secret.
"""

from kvpull_async.config.properties import LLMConfig, LlmConfig
from kvpull_async.config.settings import Settings, parse_listen

__all__ = ["LLMConfig", "LlmConfig", "Settings", "parse_listen"]
