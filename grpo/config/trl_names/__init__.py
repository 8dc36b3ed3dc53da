"""TRL's names, those of Transformers beneath it and open-r1's, as keys of today."""

from grpo.config.trl_names.translate import FIELDS, Translated, translate, typed

__all__ = ["FIELDS", "Translated", "translate", "typed"]
