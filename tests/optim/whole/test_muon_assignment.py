"""Assignment of parameters to Muon or AdamW."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from meshstep.optim import Muon, ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn


class Decoder(nn.Module):
    """A decoder whose names follow no pattern: ``words`` and ``places`` are embeddings, ``out`` is the head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 4), nn.Embedding(6, 4)
        self.mix, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.out = nn.Linear(4, 11, bias=False)
        if tied:
            self.out.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[-1], device=tokens.device)
        found: Tensor = self.out(self.norm(self.mix(self.words(tokens) + self.places(places))))
        return found


@pytest.mark.parametrize("tied", [False, True])
def test_muon_for_model_finds_embeddings_and_head_regardless_of_names(tied: bool) -> None:
    by_name = Muon.for_model(Decoder(tied)).assignment()
    assert [name for name, algorithm in by_name.items() if algorithm == "muon"] == ["mix.weight"]
    assert Muon(Decoder(tied).named_parameters()).assignment()["words.weight"] == "muon", (
        "names alone are not sufficient"
    )


def test_muon_for_model_omits_frozen_parameters_and_accepts_options() -> None:
    model = Decoder()
    model.mix.weight.requires_grad_(False)
    optimizer = Muon.for_model(model, lr=0.5, momentum=0.25)
    assert "mix.weight" not in optimizer.assignment()
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}


def test_muon_for_model_treats_only_last_weight_of_embedding_shape_as_head() -> None:
    """If the vocabulary is as large as the width, every square matrix has the shape of the embedding."""
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    by_name = Muon.for_model(model).assignment()
    assert [name for name in by_name if by_name[name] == "muon"] == ["1.weight", "2.weight"]


def test_muon_assignment_matches_module_name_with_brackets_literally() -> None:
    model = nn.ModuleDict({"a[bc]": nn.Embedding(3, 4), "ab": nn.Linear(4, 5)})
    assert Muon.for_model(model).assignment() == {"ab.weight": "muon", "a[bc].weight": "adamw", "ab.bias": "adamw"}


@pytest.mark.parametrize(
    "name",
    [
        *("tok_emb.weight", "pos_emb", "transformer.wte.weight", "model.embed_tokens.weight", "lm_head.weight"),
        *("output.weight", "proj_out.weight", "score.weight", "module.output.weight", "_orig_mod.module.score.weight"),
        *("output._orig_mod.weight", "base_model.model.score.weight", "_forward_module.proj_out.weight"),
    ],
)
def test_muon_assigns_usual_names_of_embeddings_and_heads_to_adamw(name: str) -> None:
    assert Muon([(name, nn.Parameter(torch.ones(3, 2)))]).assignment() == {name: "adamw"}


@pytest.mark.parametrize("name", ["layers.0.attention.output.weight", "blocks.1.proj_out.weight", "up.weight"])
def test_muon_assigns_inner_projections_to_muon(name: str) -> None:
    assert Muon([(name, nn.Parameter(torch.ones(3, 2)))]).assignment() == {name: "muon"}


def test_muon_repr_shows_assignment_after_copying_and_wrapping() -> None:
    model = Decoder()
    declare(model, {"*": P()})
    muon = Muon.for_model(model)
    for one in (muon, copy.deepcopy(muon), pickle.loads(pickle.dumps(muon))):
        assert "matrices by Muon: mix.weight" in repr(one)
        assert "by AdamW: words.weight" in repr(one)
    with ProcessGroupRegistry(Topology()) as registry:
        optimizer = ParallelOptimizer(muon, registry, max_norm=1.0)
        assert "matrices by Muon: mix.weight" in repr(optimizer)
        optimizer.backward(model(torch.arange(5)).square().sum())
        optimizer.step()
    assert Muon([nn.Parameter(torch.ones(3, 2))]).assignment() == {"parameter 0 of group 0": "muon"}
