"""Plant small faults in the library's code, and count how many of them the nearest tests find.

    python tests/benchmarks/code_mutants.py [--listed] [--random 40] [--seed 0] [--only optim/norm] [--processes 2]
    python tests/benchmarks/code_mutants.py --fresh 36 200 [--seconds 120] [--processes 1]

Each fault changes one expression or statement in a copy of the repository. Then the tests of the changed module run in
the copy, until the first failure. A fault that no test finds survives: write a test that fails with it, or add it to
`EQUIVALENT` with the reason why no test can fail. A fault whose tests do not end in time is "endless".

``--listed`` plants the faults in `LISTED`, which have survived earlier runs. ``--random`` draws faults with ``--seed``,
``--only`` restricts them to files, or to folders whose path begins with a prefix. ``--tests`` runs these tests instead of
the chosen ones.
``--show`` prints the faults without running tests.

``--fresh SEED COUNT`` draws faults from the whole core, of more kinds than ``--random``: a file in proportion to its
lines, then one of its faults. The tests are the files that name the changed function and its module, or whose words most
resemble those of the function.
``--seconds`` limits each run of tests. With a short limit, "endless" also counts runs that would pass or fail later.

``--record RECORD.json`` plants no faults. It runs the tests of the library once, and records the code that each executes.
``--executed RECORD.json`` runs tests that execute the changed code, as many as take a minute without a fault. Half of them
are the tests that execute the least other code; the other half come first from the files that name the changed function
and its module. A fault in code that no test executes survives without a run.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

from executed_blocks import ROOT, Record, copy_of_repository, record

SECONDS = 900  # limit of a test run; a fault may cause an endless loop or a deadlock

# The tests of each module, by the longest prefix of its path.
NEAREST: dict[str, str] = {
    "amp": "amp optim/step/test_precision_steps.py",
    "amp/by_bucket.py": "amp/test_stochastic_rounding.py optim/states/test_half_states.py",
    "amp/loss_scale.py": "amp/test_loss_scale.py amp/test_grad_scaler.py optim/step/test_precision_overflow.py",
    "amp/master_weights.py": "amp/test_master_weights.py amp/test_scalar_states.py optim/step/test_precision_steps.py",
    "amp/stochastic_rounding.py": "amp/test_stochastic_rounding.py",
    "amp/fp8.py": "amp/test_fp8.py amp/test_fp8_ranks.py",
    "amp/fp8_linear.py": "amp/test_fp8.py amp/test_fp8_ranks.py",
    "optim/clip": "optim/clip optim/test_parallel_optimizer.py",
    "optim/clip/rules.py": "optim/clip/test_clip_rules.py optim/clip/test_clip_rules_on_norm_sequences.py "
    "optim/clip/test_hand_written_rules.py optim/clip/test_clip_state.py",
    "optim/clip/functional.py": "optim/clip/test_clip_grad_norm.py optim/clip/test_without_registry.py",
    "optim/gradients": "optim/gradients",
    "optim/gradients/fixed_order.py": "optim/gradients/test_flat_layout.py optim/test_sum_order.py",
    "optim/gradients/reduce_in_backward.py": "optim/gradients optim/states/test_zero_costs.py",
    "optim/norm": "optim/norm optim/clip/test_clip_rules.py",
    "optim/norm/exact_norm.py": "optim/norm optim/test_sum_order.py",
    "optim/norm/replicas.py": "optim/norm optim/step/test_first_step.py optim/step/test_flipped_bits.py",
    "optim/norm/plan_agreement.py": "optim/norm optim/step/test_agreed_settings.py optim/step/test_invalid_input.py",
    "optim/states": "optim/states",
    "optim/states/half_states.py": "optim/states/test_half_states.py",
    "optim/states/sharded.py": "optim/states/test_zero.py optim/states/test_zero_behaviour.py",
    "optim/step": "optim/step",
    "optim/step/c_engine.py": "optim/step/test_native_update.py optim/step/test_row_cache.py",
    "optim/step/data_parallel.py": "optim/step/test_wrappers.py optim/step/test_ddp_groups.py optim/states/test_fsdp2.py",
    "optim/step/first_window_checks.py": "optim/step/test_first_step.py optim/states/test_unused_parameters.py "
    "optim/step/test_missing_params.py",
    "optim/step/host_copy.py": "optim/test_stream_order.py optim/schedule",
    "optim/step/missing_shards.py": "optim/step/test_missing_shards.py",
    "optim/step/skips.py": "optim/step/test_nonfinite.py optim/step/test_commit.py",
    "optim/step/step_agreement.py": "optim/step/test_step_agreement.py",
    "optim/step/torch_engine.py": "optim/step/test_memory_layouts.py optim/step/test_step_behaviour.py",
    "optim/step/update.py": "optim/step/test_step_behaviour.py optim/step/test_precision_steps.py",
    "optim/step/window.py": "optim/gradients/test_accumulation.py "
    "optim/step/test_clip_and_group_call_orders.py optim/step/test_rare_call_orders.py",
    "optim/step/wrapped_optimizer.py": "optim/step/test_wrapped_optimizer_calls.py optim/test_combined_optimizer.py "
    "optim/states/test_added_groups.py optim/states/test_frozen.py",
    "parallel/layout": "parallel/test_layout.py parallel/test_spec.py",
    "parallel/mesh/collectives.py": "parallel/test_collectives.py",
    "parallel/mesh/registry.py": "parallel/test_registry.py",
}


@dataclass(frozen=True)
class Fault:
    """A change of one piece of code.

    Args:
        old: The code, which occurs once in the module unless ``at`` is given.
        line: The line of the code, for messages; 0: unknown.
        at: The offset of the code in the module; None: the only place where it occurs.
        closest: The paths of the tests to run; empty: those of `NEAREST`.
    """

    file: str
    old: str
    new: str
    line: int = 0
    at: int | None = None
    closest: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.file}:{self.line or ''} {_short(self.old)!r} -> {_short(self.new)!r}"

    @property
    def key(self) -> tuple[str, str, str]:
        """Return the file, and both pieces of code without line breaks and indentation."""
        return self.file, " ".join(self.old.split()), " ".join(self.new.split())

    def apply(self, text: str) -> str:
        """Return ``text``, the module's source, with the fault applied."""
        at = text.index(self.old) if self.at is None else self.at
        return text[:at] + self.new + text[at + len(self.old) :]

    @property
    def fits(self) -> bool:
        """Return False if the code has changed since the fault was listed."""
        return self.at is not None or (ROOT / self.file).read_text().count(self.old) == 1

    @property
    def tests(self) -> list[str]:
        if self.closest:
            return [*self.closest]
        prefix = max((prefix for prefix in NEAREST if self.file.startswith(prefix)), key=len, default="optim")
        paths = [f"tests/{path}" for path in NEAREST.get(prefix, "optim").split()]
        return [path for path in paths if (ROOT / path).exists()]


def _short(code: str) -> str:
    line = " ".join(code.split())
    return line if len(line) <= 90 else f"{line[:87]}..."


# Faults that survived ---------------------------------------------------------------------------------------------------

_BUCKETS, _NORM, _SKIPS = "optim/gradients/buckets.py", "optim/norm/global_norm.py", "optim/step/skips.py"
LISTED: list[Fault] = [
    Fault(_BUCKETS, "torch._foreach_zero_([flat[start:stop] for start, stop in self._gaps])", "pass"),
    Fault(_BUCKETS, "if param.grad is None and not param.requires_grad:", "if False:"),
    Fault(_BUCKETS, "self.adopt = adopt and not self._pending", "self.adopt = adopt"),
    Fault(
        _BUCKETS, "in peers if all(topology.coordinate_of(peer, axis) in where[axis] for axis in where))", "in peers)"
    ),
    Fault(
        "optim/gradients/reduce_in_backward.py",
        "{param for param in bucket.params if param.requires_grad} for bucket",
        "{*bucket.params} for bucket",
    ),
    Fault(
        "amp/master_weights.py",
        "for _, master in late])\n        self._record_versions(held)",
        "for _, master in late])",
    ),
    Fault(
        "amp/stochastic_rounding.py",
        "                copy.grad = None\n            self._round_back",
        "                pass\n            self._round_back",
    ),
    Fault("optim/clip/clipper.py", "coef = torch.where(finite, result.factors, one)", "coef = result.factors"),
    Fault("optim/clip/clipper.py", "else torch.where(finite, shown, one), spiked", "else shown, spiked"),
    Fault("optim/clip/clipper.py", "self.checks = self.checks if always or repeats else []", "pass"),
    Fault("optim/clip/clipper.py", ".masked_fill_(total < 0, torch.nan)", ""),
    Fault(
        "optim/clip/rules.py",
        "(steps >= self.warm_up) & (bound > 0) & (norm > bound)",
        "(steps >= self.warm_up) & (norm > bound)",
    ),
    Fault(
        _NORM,
        "return powers * (weights.pow(1 / self.norm_type) if self._by_norms else weights)",
        "return powers * weights",
    ),
    Fault(_NORM, "if counted and plan.bucket_indices[i] == index]", "if plan.bucket_indices[i] == index]"),
    Fault(_NORM, "return torch.where(flags[0] > 0, total + torch.nan, total), flags[1:]", "return total, flags[1:]"),
    Fault(_NORM, "if slots == list(range(count)):", "if len(slots) == count:"),
    Fault("optim/norm/plan.py", "return owns(self.owned, coordinate) and all(", "return all("),
    Fault("optim/norm/plan.py", "named & {*self.topology.model_axes}", "named"),
    Fault("optim/norm/plan.py", "if any(index and axis not in topology.pipe_axes for", "if any(False for"),
    Fault(
        "optim/norm/plan.py",
        "[e for e in self.entries if e.trained and axis not in",
        "[e for e in self.entries if axis not in",
    ),
    Fault("optim/norm/plan.py", "if axis in topology.axes and axis not in known)", "if axis in topology.axes)"),
    Fault("optim/norm/plan_agreement.py", 'name if used[name] == 1 else f"{name}@{holders}"', "name"),
    Fault(
        "optim/norm/plan_agreement.py",
        "shapes[key] = shape if shapes.setdefault(key, shape) == shape else None",
        "shapes[key] = shape",
    ),
    Fault("optim/norm/powers.py", "(largest > 0) & largest.isfinite()", "largest > 0"),
    Fault("optim/norm/powers.py", "flat.numel() * EXACT <= found < inf", "0 < found < inf"),
    Fault("optim/states/half_states.py", 'self._keys[tensor] = f"{name} {where}"', "self._keys[tensor] = name"),
    Fault("optim/states/sharded.py", "part.to(self.grad_dtype, copy=self.release)", "part.to(self.grad_dtype)"),
    Fault(
        "optim/step/window.py",
        "ends = self.is_full or (final and self.micro_batches > 0)",
        "ends = self.is_full or final",
    ),
    Fault("optim/step/window.py", '"broken" if self.phase == "broken" else "complete"', '"complete"'),
    Fault("optim/step/window.py", '"broken" if self.phase == "broken" else "clipped"', '"clipped"'),
    Fault(_SKIPS, "        self._in_a_row.mul_(stats.found_inf)\n", ""),
    Fault(_SKIPS, 'state.get("vetoed_steps", 0)\n        self._step = 0', 'state.get("vetoed_steps", 0)'),
    Fault(
        "parallel/mesh/collectives.py",
        "max(min(chunk, length - over.rank * chunk), 0)",
        "min(chunk, length - over.rank * chunk)",
    ),
    Fault("parallel/mesh/registry.py", "is_current = not registry._closed and", "is_current ="),
    Fault(
        "parallel/mesh/registry.py",
        "        if self._closed:\n            raise",
        "        if False:\n            raise",
    ),
    Fault("parallel/layout/spec.py", " or (index < 0 and axis in dict(self.owned))", ""),
    # Faults that survived a run with ``--fresh 36 200``
    Fault(
        _BUCKETS,
        "def run_all(starts: Iterable[Callable[[], Finish]], most: int | None = 2) -> None:",
        "def run_all(starts: Iterable[Callable[[], Finish]], most: int | None = 3) -> None:",
    ),
    Fault("optim/step/data_parallel.py", "if group is not None:", "if group is None:"),
    Fault(
        "parallel/launch.py",
        'return f"meshstep/restart/{restarts}" if alone and restarts != "0" else ""',
        'return f"meshstep/restart/{restarts}" if alone or restarts != "0" else ""',
    ),
    Fault("parallel/mesh/call_tracker.py", "while waiting and time.monotonic() < until:", "while (waiting):"),
    Fault("optim/checkpoint/save.py", "if registry.global_rank == 0:", "if registry.global_rank != 0:"),
    Fault(
        "optim/checkpoint/directory.py",
        "reason = printable((str(problem).splitlines() or [type(problem).__name__])[0])",
        "reason = printable((str(problem).splitlines() and [type(problem).__name__])[0])",
    ),
    Fault(
        "parallel/mesh/random_state.py",
        'devices = {"cpu": "cpu", **({"cuda": "cuda"} if "cuda" in state and torch.cuda.is_available() else {})}',
        'devices = {"cpu": "cpu", **({"cuda": "cuda"} if "cuda" in state or torch.cuda.is_available() else {})}',
    ),
    Fault("optim/norm/replicas.py", "tie = others[0][1] == count", "tie = others[(-1)][1] == count"),
    Fault(
        "optim/gradients/buckets.py",
        "elif gradient.dtype == self.dtype and self.scale != 1.0",
        "elif gradient.dtype != self.dtype and self.scale != 1.0",
    ),
    Fault(
        "optim/states/gradient_completion.py",
        "self._next_checked = (self._next_checked + 1) % len(given)",
        "self._next_checked = (self._next_checked + (0)) % len(given)",
    ),
    Fault("optim/step/data_parallel.py", "if wrong:", "if not (wrong):"),
    Fault(
        "amp/capture.py",
        "return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()",
        "return (torch.cuda.is_initialized())",
    ),
    Fault(
        "optim/gradients/buckets.py",
        "lost.sub_(wire).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)",
        "lost.sub_(wire).nan_to_num_(nan=0.0, posinf=0.0, neginf=1.0)",
    ),
    Fault(
        "optim/step/skips.py",
        "self._arrived: list[torch.cuda.Event | None] = [None] * LAG\n        self._step = 0",
        "self._arrived: list[torch.cuda.Event | None] = [None] * LAG\n        self._step = (-1)",
    ),
    Fault("optim/checkpoint/directory.py", "shutil.rmtree(entry, ignore_errors=True)", "shutil.rmtree(entry)"),
    Fault("optim/norm/replicas.py", "flat = flat + 0.0", "flat = flat + 1.0"),
    Fault(
        "optim/parallel_optimizer.py",
        "self._agreement.used_clip.set_rule(self.clip)\n"
        "        if self._clip is not None:\n"
        "            self._clip.bind(plan.parameter_names)",
        "self._agreement.used_clip.set_rule(self.clip)\n        if self._clip is not None:\n            pass",
    ),
    Fault(
        "optim/norm/plan_agreement.py",
        "if one is None or other is None or one.text != other.text or (not tied and one.name != other.name):",
        "if (one is None or other is None or one.text != other.text):",
    ),
    Fault(
        "optim/norm/plan.py",
        "if annotation_of(param) is None and not has_dtensors((param,)):",
        "if not (annotation_of(param) is None and (not has_dtensors((param,)))):",
    ),
    Fault(
        "optim/step/window.py",
        'if self.steps is None or not self.micro_batches or self.phase == "broken":',
        "if (not self.micro_batches or self.phase == 'broken'):",
    ),
    Fault("optim/step/update.py", "lay_out_all(optimizer)", "pass"),
    Fault(
        "optim/step/step_agreement.py",
        "total: Tensor = (mixed if words.numel() == 1 else splitmix64_finalizer(mixed.cumsum(0))).sum()",
        "total: Tensor = (mixed if words.numel() == 2 else splitmix64_finalizer(mixed.cumsum(0))).sum()",
    ),
    Fault(
        "optim/step/update.py",
        'fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))',
        'fused = bool(getattr(optimizer, "_step_supports_amp_scaling", True))',
    ),
    Fault(
        "optim/states/offloaded.py",
        'a wait for the last bucket per device."""\n        with self._opened():\n            self._send(self.buckets)\n'
        "            self._arrive()",
        'a wait for the last bucket per device."""\n        with self._opened():\n            self._send(self.buckets)',
    ),
    Fault(
        "optim/states/param_transform.py",
        "if not isinstance(value, Tensor):\n        return value",
        "if not isinstance(value, Tensor):\n        pass",
    ),
    Fault(
        "optim/states/local_tensors.py",
        "if param.grad is None and piece.grad is not None and not hasattr(piece.grad, _SHARED):",
        "if False:",
    ),
    Fault(
        "optim/clip/base.py",
        'return threshold(state["steps"]) if callable(threshold) else threshold',
        'return threshold(state["steps"] + 1) if callable(threshold) else threshold',
    ),
    Fault(
        "optim/norm/measure.py", "return self.total_norm >= _norm_of(other)", "return self.total_norm > _norm_of(other)"
    ),
    Fault("optim/parallel_optimizer.py", "self._saved().check(state_dict)", "pass"),
    Fault(
        "optim/clip/functional.py",
        'check_number_threshold(clip_value, "clip_value")\n'
        "    listed, registry = _listed(unique_params(params), registry)\n"
        "    check_gradients(listed, registry)",
        'check_number_threshold(clip_value, "clip_value")\n'
        "    listed, registry = _listed(unique_params(params), registry)\n"
        "    pass",
    ),
    Fault(
        "parallel/mesh/agreement.py",
        "def describe(value: object, depth: int = 4, reads_devices: bool = True) -> str:",
        "def describe(value: object, depth: int = (3), reads_devices: bool = True) -> str:",
    ),
    Fault(
        "parallel/interop/inferred_registry.py",
        'roles[dim.name] = "pipe" if "pipe" in (roles.get(dim.name), _role_along(dim.ranks, views)) else "data"',
        'roles[dim.name] = "pipe" if False else "data"',
    ),
    Fault("optim/clip/functional.py", "norm_type=norm_type,\n            reduction=reduction,", "norm_type=norm_type,"),
    # Faults that survived a run with ``--fresh 2611 120``
    Fault(
        "parallel/interop/dtensor.py",
        '"redistribute the gradient" if _is_shard(wanted) else',
        '"redistribute the gradient" if False else',
    ),
    Fault("optim/checkpoint/contents.py", "max(len(record.groups)", "min(len(record.groups)"),
    Fault(
        "optim/clip/rules.py",
        "self._inner.finish_(gradients_of)",
        "pass",
    ),
    Fault(
        "optim/step/window.py",
        "if self.scaled_losses if self.scaled else self.calls:\n            return False",
        "if self.scaled_losses if self.scaled else self.calls:\n            pass",
    ),
    Fault(
        "optim/clip/clipper.py",
        "return answer.logical_not().to(self.device, torch.float64, non_blocking=True)",
        "pass",
    ),
    Fault("optim/clip/clipper.py", "factor=None, problem=earlier.problem)", "factor=None)"),
    Fault(
        "optim/states/offloaded.py",
        "return {param: [(copy, 0)] for param, copy in made.items()}",
        "return {param: [(copy, 1)] for param, copy in made.items()}",
    ),
    Fault(
        "optim/step/step_agreement.py",
        "return 0 if key in NOT_COMPARED else _number_of(value, self._salts[key])",
        "return -1 if key in NOT_COMPARED else _number_of(value, self._salts[key])",
    ),
    Fault("optim/clip/rules.py", "norms.units.clamp(min=1e-6)", "norms.units.clamp(min=-0.999999)"),
    Fault(
        "amp/master_weights.py",
        "(moved and addresses[index] != self._addresses[index])",
        "(moved and addresses[index] == self._addresses[index])",
    ),
    Fault(
        "optim/states/masters.py",
        "SplitWeights(self.remainders).step(self.optimizer, step)\n        self._note_weights()",
        "SplitWeights(self.remainders).step(self.optimizer, step)",
    ),
    Fault("optim/states/masters.py", "self._writes = 0  # number", "self._writes = 1  # number"),
    Fault(
        "parallel/layout/shard.py",
        "return {} if prod(self.full_shape) else {self.offsets: tensor}",
        "return {} if not prod(self.full_shape) else {self.offsets: tensor}",
    ),
    Fault("optim/states/half_states.py", "(self._split and tensor.dtype == torch.bfloat16)", "(self._split)"),
    Fault(
        "optim/states/half_states.py",
        "(self._split and tensor.dtype == torch.bfloat16)",
        "(self._split or tensor.dtype == torch.bfloat16)",
    ),
    Fault("optim/step/c_engine.py", "if len(dtypes) > 1 or dtypes - GRADIENTS or layouts - STRIDED:", "if False:"),
    Fault("optim/norm/exact_norm.py", "if self.per_parameter:", "if False:"),
    Fault(
        "optim/parallel_optimizer.py",
        'self._window.failed, self._window.last_failure = 0, ""',
        'self._window.failed, self._window.last_failure = 1, ""',
    ),
    Fault(
        "optim/norm/replicas.py",
        "torch.where(finite, by_kind[:, :, 1], 0.0)",
        "torch.where(finite, by_kind[:, :, 1], -1.0)",
    ),
    # Faults that survived a run with ``--fresh 2614 200``
    Fault(
        "optim/step/first_window_checks.py",
        "if scaled and not any(rank.scaled_losses for rank in seen) and any(",
        "if scaled and any(",
    ),
    Fault(
        "parallel/mesh/registry.py",
        '(dist.get_backend_config(self._world) if self._world is not None else "")',
        '(dist.get_backend_config(self._world) if False else "")',
    ),
    Fault("optim/kernels/memory.py", "key=tensor.stride, reverse=True", "key=tensor.stride, reverse=False"),
    Fault("amp/by_bucket.py", "        held += size\n", ""),
    Fault(
        "optim/checkpoint/torch_states.py",
        "flat = torch.zeros(self.local.numel(), dtype=dtype, device=self.registry.device)",
        "flat = torch.zeros(self.local.numel(), device=self.registry.device)",
    ),
    Fault(
        "optim/step/update_request.py",
        "replace(self, skip_of={copies.get(tensor, tensor): skip for tensor, skip in self.skip_of.items()})",
        "replace(self)",
    ),
    Fault(
        "parallel/layout/annotation.py",
        "existing.full_shape if existing is not None and existing.spec == spec else None",
        "existing.full_shape if False else None",
    ),
    Fault(
        "optim/step/wrapped_optimizer.py",
        '"params": [given] if isinstance(given, Tensor) else list(given)}',
        '"params": [given] if False else list(given)}',
    ),
    Fault("optim/norm/powers.py", "device, kinds = gradients[0].device", "device, kinds = gradients[-1].device"),
    Fault(
        "optim/norm/exact_norm.py",
        "device = present[0][1].device if present else self._collective_device",
        "device = present[0][1].device if not present else self._collective_device",
    ),
    Fault(
        "optim/states/state_hash.py",
        "row.region.start == 0 and not any(row.region.offsets)",
        "row.region.start == 0 and any(row.region.offsets)",
    ),
    Fault(
        "optim/states/local_tensors.py",
        "if not has_dtensors(tensors):\n            return {}\n        from",
        "if not has_dtensors(tensors):\n            pass\n        from",
    ),
    Fault("optim/step/window.py", "self.error = self.error or error", "self.error = error"),
    Fault(
        "optim/norm/replicas.py",
        "numbers = (numbers ^ _shift_right(numbers, bits)) * factor",
        "numbers = (numbers ^ _shift_right(numbers, bits)) + factor",
    ),
    Fault(
        "optim/clip/functional.py",
        "clip.rule, agreed(partial(_checked_plan, listed, registry), registry, names=True)",
        "clip.rule, agreed(partial(_checked_plan, listed, registry), registry)",
    ),
    Fault(
        "parallel/layout/annotation.py",
        "axis not in described and topology.size(axis) > 1",
        "axis not in described and topology.size(axis) > (0)",
    ),
    Fault("optim/step/window.py", "_SCALED = 2.0**30", "_SCALED = (1.0)**30"),
    Fault(
        "optim/gradients/fixed_order.py", "        work.wait()\n        del sent", "        work.wait()\n        pass"
    ),
    Fault(
        "optim/step/step_agreement.py",
        "mine is known or (type(mine) is type(known) is float and mine == known)",
        "mine is known and (type(mine) is type(known) is float and mine == known)",
    ),
    # Faults that survived a run with ``--fresh 2615 200``
    Fault(
        "optim/checkpoint/contents.py",
        "(isinstance(value, Tensor) and value.numel() == 0)",
        "(isinstance(value, Tensor))",
    ),
    Fault("optim/parallel_optimizer.py", "self._setup.check_sum_order_of(clip)", "pass"),
    Fault("optim/clip/functional.py", "scale_info, in_place=True, captured", "scale_info, in_place=False, captured"),
    Fault(
        "optim/clip/functional.py",
        "gradient.layout != torch.strided or gradient.is_complex()",
        "gradient.layout != torch.strided",
    ),
    Fault("optim/gradients/fixed_order.py", "if place % 2 == 0 else None", "if place % 1 == 0 else None"),
    Fault("parallel/mesh/registry.py", "if isinstance(found, str):", "if False:"),
    Fault("optim/states/optimizer_state.py", 'check_text(name, f"a key of {where}")', "pass"),
    Fault("amp/loss_scale.py", '"an integer" if is_count else', '"an integer" if False else'),
    Fault("optim/parallel_optimizer.py", "self._grad_sync.discard_old_weights()", "pass"),
]

# Faults that no test can find, with the reason. The code is written without line breaks.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "optim/norm/plan.py",
        "not spec.entries",
        "False",
    ): "without entries, each dim is multiplied by the size of no axis",
    ("optim/clip/functional.py", "check_packed(rule, reduction)", "pass"): "the clipper raises the same error",
    (
        "optim/states/chain.py",
        "next(names, None) or label_of(tensor)",
        "(next(names, None))",
    ): "each parameter has a name or a number",
    (
        "parallel/mesh/call_tracker.py",
        "threading.main_thread().ident or 0",
        "(threading.main_thread().ident)",
    ): "a running main thread has a number",
    (
        "optim/states/sharded.py",
        "self.params[index].is_contiguous() or now[index] != self._seen[index]",
        "(now[index] != self._seen[index])",
    ): "the shard of a contiguous parameter is a view of it, so their values are equal",
    (
        "optim/step/torch_engine.py",
        "factor is not None and torch.float64 in {param.dtype for param in params}",
        "(factor is not None)",
    ): "gradients are multiplied by the factor in either case, up to a rounding error",
    (
        "optim/step/torch_engine.py",
        "torch.empty_like(param, requires_grad=False, memory_format=order)",
        "torch.empty_like(param, memory_format=order)",
    ): "False is the default",
    (
        "optim/states/gradient_completion.py",
        "self._agreement is not None and without_gradient",
        "(self._agreement is not None)",
    ): "without such parameters, the new value equals the old one, which `_frozen_since` has reset",
    (
        "optim/gradients/buckets.py",
        "gradient.dtype == self.dtype and self.scale != 1.0",
        "gradient.dtype == self.dtype and self.scale != 2.0",
    ): "the other branch also multiplies by the scale, with a second pass over memory",
    (
        "optim/step/step_agreement.py",
        "self._values = [tensor.tolist() for tensor in self._on_cpu]",
        "pass",
    ): "the facts are computed again in each step, with equal results",
    (
        "parallel/layout/spec.py",
        "blocks_repr(axes[0], sizes[axes[0]]) if axes[0] in sizes else repr(axes[0])",
        "blocks_repr(axes[0], sizes[axes[0]]) if axes[0] in sizes else repr(axes[(-1)])",
    ): "here the tuple has one axis",
    (
        "optim/checkpoint/save.py",
        'ThreadPoolExecutor(1, thread_name_prefix="meshstep-checkpoint")',
        'ThreadPoolExecutor(2, thread_name_prefix="meshstep-checkpoint")',
    ): "`AsyncSaver.save` waits for the previous checkpoint, so that one thread runs at a time",
    (
        "optim/step/step_agreement.py",
        "self.registry.global_rank == ranks[0]",
        "self.registry.global_rank == ranks[1]",
    ): "the coefficients add up to 0 whichever rank has the coefficient 1 - n",
    (
        "optim/states/sharded.py",
        "self._grad_dtype(params[0]), self.placement.gradients",
        "self._grad_dtype(params[(-1)]), self.placement.gradients",
    ): "all parameters of a bucket have one dtype",
    (
        "optim/norm/global_norm.py",
        "len(values) == 1",
        "len(values) == (0)",
    ): "the sum and the p-norm of one value are the value",
}


# Random faults ----------------------------------------------------------------------------------------------------------

PREFIXES = ("optim/norm/", "optim/clip/", "optim/gradients/", "optim/step/", "amp/")
_FLIPPED: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: (" is ", " is not "),
    ast.IsNot: (" is not ", " is "),
    ast.In: (" in ", " not in "),
    ast.NotIn: (" not in ", " in "),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.And: (" and ", " or "),
    ast.Or: (" or ", " and "),
}


def faults_in(path: Path, more: bool = False) -> Iterator[Fault]:
    """Yield all faults of the fixed kinds in a module.

    The kinds are: another operator; a negated condition; a condition of an ``if`` replaced by False; True for False and
    the reverse; a number larger by 1; a call statement or an assignment to an attribute left out. Annotations,
    docstrings, f-strings, raised errors and references for tests are not changed. A module with non-ASCII characters
    has no faults.

    ``more``: also yield the faults of `_more_faults`, and none in log messages and texts of objects.
    """
    text, file = path.read_text(), str(path.relative_to(ROOT))
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    if not text.isascii():
        return

    def fault(node: ast.AST, new: str, start: int | None = None, stop: int | None = None) -> Fault:
        found: ast.expr = node  # type: ignore[assignment]
        first = starts[found.lineno - 1] + found.col_offset if start is None else start
        last = starts[(found.end_lineno or 0) - 1] + (found.end_col_offset or 0) if stop is None else stop
        return Fault(file, text[first:last], new, found.lineno, first)

    def place(node: ast.expr, end: bool = False) -> int:
        line, column = (node.end_lineno, node.end_col_offset) if end else (node.lineno, node.col_offset)
        return starts[(line or 0) - 1] + (column or 0)

    tree = ast.parse(text)
    ignored: set[ast.AST] = set()
    for node in ast.walk(tree):
        hidden: list[ast.AST | None] = []
        if isinstance(node, ast.AnnAssign | ast.arg):
            hidden = [node.annotation]
        elif isinstance(node, ast.keyword) and node.arg == "strict":  # `zip` only checks lengths by it
            hidden = [node.value]
        elif isinstance(node, ast.FunctionDef):
            is_reference = node.name.startswith("reference_")  # only tests call it
            is_text = more and node.name in ("__str__", "__repr__")
            hidden = [node if is_reference or is_text else node.returns, *node.decorator_list]
        elif more and isinstance(node, ast.ClassDef):
            hidden = [*node.decorator_list]
        elif isinstance(node, ast.Raise | ast.JoinedStr) or _is_left_out(node, more):
            hidden = [node]
        ignored.update(inner for part in hidden if part is not None for inner in ast.walk(part))
    for node in ast.walk(tree):
        if node in ignored:
            continue
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _FLIPPED:
            yield _between(fault, place(node.left, end=True), place(node.comparators[0]), node, node.ops[0], text)
        elif isinstance(node, ast.BinOp) and type(node.op) in _FLIPPED:
            yield _between(fault, place(node.left, end=True), place(node.right), node, node.op, text)
        elif isinstance(node, ast.BoolOp):
            yield _between(fault, place(node.values[0], end=True), place(node.values[1]), node, node.op, text)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield fault(node, ast.unparse(node.operand))
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield fault(node, str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield fault(node, repr(node.value + 1))
        elif isinstance(node, ast.If | ast.IfExp):
            yield fault(node.test, "False")
            if not isinstance(node.test, ast.UnaryOp | ast.Compare):
                yield fault(node.test, f"not ({ast.unparse(node.test)})")
        elif (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) or (
            isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)
        ):
            yield fault(node, "pass")
        if more:
            for part, new in _more_faults(node):
                yield fault(part, new)


# Faults that only `--fresh` plants ----------------------------------------------------------------------------------------

# Files of the core by tests/docs/test_core_and_periphery.py, without packages of the periphery, and without the C kernels.
CORE = (
    *(
        "amp/by_bucket.py",
        "amp/capture.py",
        "amp/casting.py",
        "amp/loss_scale.py",
        "amp/master_weights.py",
        "amp/modes.py",
    ),
    *("amp/stochastic_rounding.py", "optim/arguments.py", "optim/build.py", "optim/parallel_optimizer.py"),
    *(f"optim/{name}/" for name in ("checkpoint", "clip", "gradients", "kernels", "norm", "states", "step")),
    *("parallel/interop/", "parallel/launch.py", "parallel/layout/", "parallel/mesh/"),
)
LEFT_OUT = (
    *("optim/kernels/triton.py", "optim/kernels/triton_kernels.py", "optim/states/replayable.py"),
    *(f"parallel/interop/{name}.py" for name in ("audit", "deepspeed", "megatron", "megatron_mla", "transformers")),
    *("parallel/layout/picture.py", "parallel/mesh/text.py"),  # pictures, and texts of errors
)
_MESSAGE = re.compile(r"(\w+\.)*(_?log|_?logger|warnings|logging)\.|warn")
_EXCHANGED = {"min": "max", "max": "min", "any": "all", "all": "any"}


def _more_faults(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield pieces of code and their replacements.

    The kinds are: a keyword argument left out; min and max, or any and all, exchanged; a number smaller by 1; one operand
    of ``and`` or ``or`` left out; an assignment to an item, an augmented assignment, ``break``, ``continue`` or ``del``
    left out; a return at the end of an ``if`` left out; a bound of a slice left out.
    """
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in _EXCHANGED:
            yield node.func, _EXCHANGED[node.func.id]
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg != "strict":
                others = [other for other in node.keywords if other is not keyword]
                yield node, ast.unparse(ast.Call(node.func, node.args, others))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        yield node, f"({node.value - 1!r})"
    elif isinstance(node, ast.BoolOp):
        for left_out in node.values:
            rest = [value for value in node.values if value is not left_out]
            yield node, f"({ast.unparse(rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))})"
    elif isinstance(node, ast.AugAssign | ast.Break | ast.Continue | ast.Delete) or (
        isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)
    ):
        yield node, "pass"
    elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return) and not node.orelse:
        yield node.body[-1], "pass"
    elif isinstance(node, ast.Slice) and node.lower is not None and node.upper is not None:
        yield node, f":{ast.unparse(node.upper)}"
        yield node, f"{ast.unparse(node.lower)}:"


def core_files() -> list[Path]:
    found = (path for name in CORE for path in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py")))
    return sorted(path for path in found if not str(path.relative_to(ROOT)).startswith(LEFT_OUT))


def draw_fresh(count: int, seed: int) -> list[Fault]:
    """Return ``count`` different random faults in the core: each in a file drawn in proportion to its lines."""
    paths = core_files()
    faults = {path: [*faults_in(path, more=True)] for path in paths}
    paths = [path for path in paths if faults[path]]
    lines = [path.read_text().count("\n") for path in paths]
    generator, drawn = random.Random(seed), dict[tuple[str, str, int | None], Fault]()
    while len(drawn) < count:
        fault = generator.choice(faults[generator.choices(paths, lines)[0]])
        drawn.setdefault((fault.file, fault.new, fault.at), fault)
    return [replace(fault, closest=closest_tests(fault)) for fault in drawn.values()]


SECONDS_OF_TESTS = 60.0  # total time, without the fault, of the tests that run for one fault


def executing_tests(fault: Fault, executed: Record, seconds: float = SECONDS_OF_TESTS) -> tuple[str, ...]:
    """Return tests that execute the code of a fault, and that take at most ``seconds`` together: alternately the next one
    that executes the least other code, and the next one in the order of `_by_names`.

    Return the test files of `closest_tests` for code outside blocks: code that is executed on import, and Triton kernels.
    """
    specific = executed.tests_of(fault.file, fault.line)
    if specific is None:
        return closest_tests(fault)
    rank = {path: index for index, path in enumerate(_by_names(fault))}
    similar = sorted(specific, key=lambda name: rank.get(name.partition("::")[0], len(rank)))
    chosen, left = dict[str, None](), seconds
    for name in (name for pair in zip(specific, similar, strict=True) for name in pair):
        if name not in chosen and executed.seconds[name] <= left:
            chosen[name] = None
            left -= executed.seconds[name]
    return tuple(chosen) or tuple(specific[:1])


@cache
def _words_of_tests() -> dict[str, Counter[str]]:
    folders = ("amp", "optim", "parallel", "mistakes", "interop")
    paths = [path for folder in folders for path in sorted((ROOT / "tests" / folder).rglob("test_*.py"))]
    return {str(path.relative_to(ROOT)): Counter(re.findall(r"\w+", path.read_text())) for path in paths}


def closest_tests(fault: Fault, most: int = 6) -> tuple[str, ...]:
    """Return test files for a fault: up to ``most`` of `_by_names`, and as many of `_by_words`. Files without ranks come
    first."""
    best = dict.fromkeys([*_by_names(fault)[:most], *_by_words(fault)[:most]])
    return tuple(sorted(best, key=lambda path: _words_of_tests()[path]["world"] > 0))


def _by_names(fault: Fault) -> list[str]:
    """Return all test files, sorted by how likely they find the fault, the most likely first.

    Files score by the names of functions and classes around the fault, by other names of the module, and by the words
    of their own name.
    """
    tree = ast.parse((ROOT / fault.file).read_text())
    named = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    around = {node.name for node in named if node.lineno <= fault.line <= (node.end_lineno or 0)}
    of_module = {node.name for node in named if isinstance(node, ast.ClassDef) or node in tree.body}
    stem, listed = {*re.split("_", Path(fault.file).stem)}, replace(fault, closest=()).tests
    scores: dict[str, float] = {}
    for path, words in _words_of_tests().items():
        score = 4.0 * len({*Path(path).stem.split("_")[1:]} & stem) + 3.0 * path.startswith(tuple(listed))
        score += sum(6.0 for name in around if name in words and not name.startswith("__"))
        score += sum(1.5 for name in of_module - around if name in words)
        score += 1.5 * (Path(path).parent.name == Path(fault.file).parent.name)
        scores[path] = score - 4 * path.startswith("tests/interop/")
    return sorted(scores, key=lambda path: -scores[path])


def _by_words(fault: Fault) -> list[str]:
    """Return all test files except `tests/interop`, sorted by similarity to the function with the fault, highest first.

    The similarity (TF-IDF) compares all words of the function, including the words of its strings and the parts of its
    names.
    """
    text = (ROOT / fault.file).read_text()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    around = [node for node in functions if node.lineno <= fault.line <= (node.end_lineno or 0)]
    innermost = (around and ast.get_source_segment(text, around[-1])) or text  # `ast.walk` yields inner functions later
    vectors, rarity = _vectors_of_tests()
    words = _weighted(_parts(Counter(re.findall(r"\w+", innermost))), rarity)
    scores = {
        path: sum(weight * vector[word] for word, weight in words.items() if word in vector)
        for path, vector in vectors.items()
    }
    return sorted(scores, key=lambda path: -scores[path])


@cache
def _vectors_of_tests() -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return the weights of the words in each test file, and log(files / files with the word) for each word."""
    counts = {path: _parts(words) for path, words in _words_of_tests().items() if not path.startswith("tests/interop/")}
    files = Counter(word for words in counts.values() for word in words)
    rarity = {word: math.log(len(counts) / number) for word, number in files.items()}
    vectors = {}
    for path, words in counts.items():
        weights = _weighted(words, rarity)
        # A power below 1 of the length prefers long files, which test more functions.
        length = math.hypot(*weights.values()) ** 0.75
        vectors[path] = {word: weight / length for word, weight in weights.items()}
    return vectors, rarity


def _parts(words: Counter[str]) -> Counter[str]:
    """Return the counts of the words of more than two letters, and of the parts between the underscores of each word."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for part in {word, *word.strip("_").lower().split("_")}:
            if len(part) > 2 and not part.isdigit():
                counts[part] += count
    return counts


def _weighted(words: Counter[str], rarity: dict[str, float]) -> dict[str, float]:
    return {word: (1 + math.log(count)) * rarity[word] for word, count in words.items() if word in rarity}


def _is_left_out(node: ast.AST, more: bool) -> bool:
    """Return True for a condition on TYPE_CHECKING, and for a log message if ``more``."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return more and isinstance(node, ast.Call) and _MESSAGE.match(ast.unparse(node.func)) is not None


def _between(fault: object, start: int, stop: int, node: ast.AST, operator: ast.AST, text: str) -> Fault:
    old, new = _FLIPPED[type(operator)]
    changed = (
        text[start:stop].replace(old, new, 1)
        if old in text[start:stop]
        else text[start:stop].replace(old.strip(), new.strip(), 1)
    )
    return fault(node, changed, start, stop)  # type: ignore[operator, no-any-return]


def draw(count: int, seed: int, prefixes: tuple[str, ...]) -> list[Fault]:
    """Return ``count`` random faults, or all if there are fewer.

    They are in the files among ``prefixes``, and in the folders whose paths begin with one of ``prefixes``.
    """
    paths = sorted(path for prefix in prefixes for path in ROOT.glob(f"{prefix.rstrip('/')}*/**/*.py"))
    paths += sorted(ROOT / prefix for prefix in prefixes if prefix.endswith(".py"))
    everything = [fault for path in paths for fault in faults_in(path) if fault.key not in EQUIVALENT]
    return random.Random(seed).sample(everything, min(count, len(everything)))


# Test runs --------------------------------------------------------------------------------------------------------------


def outcome_of(fault: Fault, copy: Path, tests: list[str], seconds: float = SECONDS) -> str:
    """Return "found", "survived", or after ``seconds`` "endless": the result of ``tests`` (empty: the nearest tests) with
    the fault.

    Return "outdated" if the code has changed since the fault was listed: update `LISTED`.
    """
    if not fault.fits:
        return "outdated"
    path = copy / fault.file
    before = path.read_text()
    path.write_text(fault.apply(before))
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *(tests or fault.tests)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "MESHSTEP_TEST_PROFILE": "once",  # with the long tests
    }
    try:
        run = subprocess.Popen(
            command,
            cwd=copy,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return "found" if run.wait(seconds) else "survived"
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, 9)
        return "endless"
    finally:
        path.write_text(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--listed", action="store_true")
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", type=int, nargs=2, metavar=("SEED", "COUNT"), default=(0, 0))
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--only", nargs="+", default=[*PREFIXES])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tests", nargs="+", default=[], help="run these tests instead of the nearest ones")
    parser.add_argument("--executed", type=Path, help="choose the tests by this file of --record")
    parser.add_argument("--record", type=Path, help="write to this file which tests execute which code")
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    if options.record:
        with tempfile.TemporaryDirectory() as folder:
            files = [str(path.relative_to(ROOT)) for path in core_files()]
            tests = options.tests or [f"tests/{name}" for name in ("amp", "mistakes", "optim", "parallel")]
            record(copy_of_repository(Path(folder)), files, options.record, options.processes, tests)
        return
    faults = [fault for fault in LISTED if fault.key not in EQUIVALENT] if options.listed else []
    faults += draw(options.random, options.seed, tuple(options.only))
    faults += draw_fresh(options.fresh[1], options.fresh[0])
    if options.executed:
        executed = Record(options.executed)
        faults = [replace(fault, closest=executing_tests(fault, executed)) for fault in faults]
    if options.show:
        for fault in faults:
            print(fault if fault.fits else f"outdated  {fault}")
        print(f"faults: {len(faults)}")
        return
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.processes):
            copies.put(copy_of_repository(Path(folder) / str(number)))

        def run(fault: Fault) -> tuple[Fault, str]:
            if options.executed and not fault.closest:
                return fault, "survived"
            copy = copies.get()
            try:
                return fault, outcome_of(fault, copy, options.tests, options.seconds)
            finally:
                copies.put(copy)

        for fault, outcome in pool.map(run, faults):
            print(f"{outcome:9} {fault}", flush=True)
            for name in (str(Path(fault.file).parent), "all"):
                counts.setdefault(name, Counter())[outcome] += 1
    print(f"{'folder':20}" + "".join(f"{name:>10}" for name in ("planted", "found", "endless", "survived", "outdated")))
    for name, counted in sorted(counts.items()):
        row = (counted.total(), counted["found"], counted["endless"], counted["survived"], counted["outdated"])
        print(f"{name:20}" + "".join(f"{value:10}" for value in row))


if __name__ == "__main__":
    main()
