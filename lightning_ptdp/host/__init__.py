"""The private names of PyTorch, torchmetrics and Lightning that the package uses, each with its reason.

Nobody else names them, so that a release which renames one breaks a line here, and `tests/test_host.py` says which. No
loop is replaced. One file for each package: what needs torch alone reads `torch.py`, and knows no Lightning.
"""
