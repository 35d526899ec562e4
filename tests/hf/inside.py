"""What the tests of reuse inside a prompt share: a document, the prompt it was computed in, and how far two
answers are apart. The fixture `attach` (conftest.py) stores that prompt.
"""

import torch

from kvclient.hf import Repair
from tests.hf.zoo import prompt

BLOCK = 16
AUTO = Repair(caution=1.0)  # as if this model had been calibrated
DOCUMENT = prompt(100, seed=5)
COMPUTED = torch.cat([prompt(21, seed=2), DOCUMENT, prompt(20, seed=3)], dim=1)


def divergence(logits, plain):
    return float((torch.softmax(plain, -1) * (plain.log_softmax(-1) - logits.log_softmax(-1))).sum(-1).mean())
