"""WeakTensorDict: values by a tensor's identity, until it is freed."""

import gc

import torch

from collectives.weak_tensors import WeakTensorDict


def test_values_go_by_identity_and_with_the_tensor():
    found, one, other = WeakTensorDict(), torch.zeros(3), torch.nn.Parameter(torch.zeros(3))
    found[one] = "one"
    assert found.get(one) == "one" and found.get(other) is None and found.get(other, 5) == 5
    found[other], found[one] = None, "again"
    assert found.get(one) == "again" and other in found and len(found) == 2
    del one
    gc.collect()
    assert len(found) == 1 and other in found


def test_a_tensor_that_only_autograd_holds_keeps_its_value():
    found, param = WeakTensorDict(), torch.nn.Parameter(torch.ones(2))
    found[param] = 7
    node = (param * 2).grad_fn.next_functions[0][0]
    del param
    gc.collect()
    assert found.get(node.variable) == 7
    del node
    gc.collect()
    assert not len(found)
