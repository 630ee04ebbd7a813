"""Questions about images, one after the other, on an engine of its own, told on standard output as JSON: each answer's
tokens, their log-probabilities, and how many of the prompt's were not computed.

On standard input: model, manthan (its options, or null for none), questions: the number of an image and a text.
"""

import json
import sys

import numpy as np
from group_sessions import ANSWER, engine, let_go_cold
from image_model import PIXELS
from PIL import Image


def picture(number: int) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def main() -> None:
    job = json.load(sys.stdin)
    options = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}, "mm_processor_cache_gb": 0}
    llm, answers = engine(job | {"batched_tokens": 2048, "engine": options}), []
    for number, text in job["questions"]:
        prompt = {"prompt": text, "multi_modal_data": {"image": picture(number)}}
        [found] = llm.generate([prompt], ANSWER, use_tqdm=False)
        told = found.outputs[0]
        logprobs = [next(iter(each.values())).logprob for each in told.logprobs or []]
        answers.append({"tokens": list(told.token_ids), "logprobs": logprobs, "cached": found.num_cached_tokens})
        if job["manthan"] is not None:
            let_go_cold(llm)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
