"""Every test process uses one core: `make test` runs as many of them as there are cores."""

import torch

torch.set_num_threads(1)
