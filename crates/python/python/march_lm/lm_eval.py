"""A model for lm-evaluation-harness, in this process: many requests in one call, contexts read once.

    python -m march_lm.lm_eval run --model march --model_args path=DIR --tasks lambada_openai,piqa

is the harness's own command, which then knows the model `march`. In Python, importing this module is enough:

    import lm_eval, march_lm.lm_eval
    lm_eval.simple_evaluate(model="march", model_args="path=DIR", tasks=["piqa"])

The arguments of the model are `path` (without it, the model inside the package), `weights`, `threads`, `tokenizer`, and
those of a policy: `interval`, `top_k`, `retention`, `placement`, `storage`.
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

import march_lm

__all__ = ["March"]

# The harness's own default for tasks that do not name a number of tokens.
MAX_TOKENS = 256


def generate_request(context: str, options: dict[str, Any]) -> dict[str, Any]:
    """A request to continue a text. Texts are continued greedily, so any other options are an error."""
    samples = options.get("do_sample", bool(options.get("temperature")))
    unknown = set(options) - {"until", "max_gen_toks", "do_sample", "temperature"}
    if unknown or samples:
        raise ValueError(f"march answers greedily and knows until and max_gen_toks only; the task asks for {options}")
    until = options.get("until") or []
    return {
        "kind": "generate_until",
        "context": context,
        "until": [until] if isinstance(until, str) else list(until),
        "max_tokens": options.get("max_gen_toks", MAX_TOKENS),
    }


@register_model("march")
class March(LM):
    """A model of march."""

    def __init__(
        self,
        path: str | None = None,
        weights: Any = None,
        threads: int | None = None,
        tokenizer: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: str | None = None,
        **policy: Any,
    ) -> None:
        # The size of a batch does not change answers; it is chosen by the number of tokens.
        super().__init__()
        model = march_lm.load(path, weights=weights, threads=threads, tokenizer=tokenizer)
        self.march = model.with_policy(**policy)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self.march.loglikelihood([request.args for request in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        kind = "loglikelihood_rolling"
        answers = self.march.answer([{"kind": kind, "text": request.args[0]} for request in requests])
        return [answer[kind]["loglikelihood"] for answer in answers]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        answers = self.march.answer([generate_request(*request.args) for request in requests])
        return [answer["generate_until"] for answer in answers]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
