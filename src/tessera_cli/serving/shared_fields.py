"""The sampling fields of a request that its JSON and the engine call the same."""

SHARED_FIELDS = (
    "top_p",
    "n",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)
