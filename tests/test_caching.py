"""Caches never lie: what changes the graph changes the key, over processes that share one cache folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from models import Block, compile_fp8, normal, run_module

PROGRAM = """
import hashlib, json, sys
import torch
from torch import nn
from torch._dynamo.utils import counters
import fp8compile as fp8

class Unhashable(fp8.Policy):
    def decide(self, site):
        return fp8.use(fp8.RECIPES["rowwise"], "mine")

POLICIES = {"all": "all", "keep a": fp8.Policy.all().keep("a"), "unhashable": Unhashable("all")}

class Named(nn.Module):
    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        setattr(self, name, nn.Linear(64, 32, bias=False))
        self.name = name
    def forward(self, x):
        return getattr(self, self.name)(x)

def run(name, policy, recipe):
    torch._dynamo.reset()
    counters.clear()
    model = Named(name)
    torch.manual_seed(1)
    x = torch.randn(48, 64, requires_grad=True)
    options = {"policy": POLICIES[policy], "recipe": recipe, "verify": True}
    out = torch.compile(model, backend="fp8", options=options)(x)
    out.backward(torch.randn(48, 32))
    digest = hashlib.sha256()
    for tensor in (out.detach(), x.grad, getattr(model, name).weight.grad):
        digest.update(tensor.contiguous().numpy().tobytes())
    found = counters["inductor"]
    keys = ("hit", "miss", "bypass")
    return {"digest": digest.hexdigest(), **{key: found["fxgraph_cache_" + key] for key in keys}}

print(json.dumps([run(*case) for case in json.loads(sys.argv[1])]))
"""

Case = tuple[str, str, str]
TENSORWISE: Case = ("a", "all", "tensorwise")
ROWWISE: Case = ("a", "all", "rowwise")
KEPT: Case = ("a", "keep a", "tensorwise")
NOT_KEPT: Case = ("b", "keep a", "tensorwise")
UNHASHABLE: Case = ("a", "unhashable", "tensorwise")


@dataclass(frozen=True)
class Result:
    """What one compilation computed, and how Inductor's cache answered for its forward and its backward."""

    digest: str
    hit: int
    miss: int
    bypass: int


def process(folder: Path, *cases: Case) -> dict[Case, Result]:
    """Compile and run the cases in a process of their own with ``folder`` as Inductor's cache."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(cases)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    results = json.loads(run.stdout.splitlines()[-1])
    return {case: Result(**result) for case, result in zip(cases, results, strict=True)}


def test_two_processes_with_one_cache_folder(tmp_path: Path) -> None:
    """What a process compiled another one finds, and nothing else. One test, because it takes half a minute."""
    first = process(tmp_path, TENSORWISE, ROWWISE, KEPT, UNHASHABLE)
    second = process(tmp_path, ROWWISE, TENSORWISE, NOT_KEPT, UNHASHABLE)

    # the same program is found, forward and backward, in whatever order, and computes the same bytes
    for case in (TENSORWISE, ROWWISE):
        assert (first[case].hit, first[case].miss) == (0, 2)
        assert (second[case].hit, second[case].miss) == (2, 0)
        assert second[case].digest == first[case].digest

    # two recipes are two graphs
    assert first[TENSORWISE].digest != first[ROWWISE].digest

    # names that a policy looks at are part of the key: the same graph, its layer called a or b, and a rule keeps a
    assert second[NOT_KEPT].hit == 0
    assert first[KEPT].digest not in (second[NOT_KEPT].digest, first[TENSORWISE].digest)
    assert second[NOT_KEPT].digest == first[TENSORWISE].digest

    # a policy without a fingerprint is never looked up and never stored
    for results in (first, second):
        assert (results[UNHASHABLE].hit, results[UNHASHABLE].miss) == (0, 0)
        assert results[UNHASHABLE].bypass >= 1
    assert first[UNHASHABLE].digest == second[UNHASHABLE].digest == first[ROWWISE].digest


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_same_inputs_same_bytes(recipe: str) -> None:
    """Compiled twice and run twice each: outputs and all gradients are equal bit for bit."""
    model, x = Block(), normal(2, 16, 64)
    runs = []
    for _ in range(2):
        torch._dynamo.reset()
        call = compile_fp8(model, recipe=recipe)
        runs += [run_module(call, model, x) for _ in range(2)]
    first = runs[0].tensors()
    assert len(first) > 10
    for other in runs[1:]:
        for name, tensor in other.tensors().items():
            assert torch.equal(tensor, first[name]), name


def test_switching_the_policy_of_one_model_recompiles() -> None:
    """Within a process, too: the second policy is not answered with the first one's graph, nor the third."""
    model, x = torch.nn.Linear(64, 64), normal(32, 64, requires_grad=False)
    with torch.no_grad():
        exact = model(x)
        outs = [compile_fp8(model, policy=policy)(x) for policy in ("all", "none", "all")]
    assert torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], exact)
    torch.testing.assert_close(outs[1], exact, rtol=1e-6, atol=1e-6)
