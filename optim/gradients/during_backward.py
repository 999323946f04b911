"""Reduce gradients bucket by bucket while backward makes more of them, and free them: what ZeRO-2 adds to ZeRO-1."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from ..states.bucket import Exchanges, ShardedBucket


class BackwardReducer:
    """Reduces each bucket once a micro-batch, as soon as all of its parameters have their gradients.

    Which gradients come, and in what order, may differ between ranks; the order of collectives must not. So buckets are
    reduced in the order given: one that is full waits for those before it, and what is left when backward ends, because
    some parameter got no gradient here, is reduced then, zeros in the place of what is missing.

    Args:
        names: Of all parameters, for errors.
        eager: Buckets, in the order in which backward fills them.
        late: Buckets that are reduced after backward, in this order.
    """

    def __init__(self, names: dict[Tensor, str], eager: Sequence[ShardedBucket], late: Sequence[ShardedBucket]) -> None:
        self.micro_batches = 0
        self._names, self._eager, self._late = names, list(eager), list(late)
        self._bucket_of = {param: index for index, bucket in enumerate(self._eager) for param in bucket.params}
        self._is_open = False
        # Weak, or the model would keep this optimizer alive after another has taken its place.
        self._hooks = [param.register_post_accumulate_grad_hook(_weak_hook(self)) for param in self._bucket_of]

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Around one backward: all buckets have been reduced, and the parameters' gradients are gone, when it ends."""
        self._waiting = [{param for param in bucket.params if param.requires_grad} for bucket in self._eager]
        self._next, self._exchanges, self._is_open = 0, Exchanges(), True
        try:
            yield
            for bucket in (*self._eager[self._next :], *self._late):
                self._exchanges.add(bucket.reduce(release=True))
            self._exchanges.finish()
        finally:
            self._is_open = False
        self.micro_batches += 1

    def _arrived(self, param: Tensor) -> None:
        if not self._is_open:
            return  # a backward that the optimizer was not told of: its gradients wait for the step, or the next one
        index = self._bucket_of[param]
        if index < self._next:
            raise RuntimeError(
                f"{self._names[param]} got a second gradient in one backward, after the first had been reduced (re-entrant "
                "activation checkpointing does that): use checkpoint(..., use_reentrant=False) or shard_gradients=False"
            )
        self._waiting[index].discard(param)
        while self._next < len(self._eager) and not self._waiting[self._next]:
            self._exchanges.add(self._eager[self._next].reduce(release=True))
            self._next += 1

    def reduce_rest(self) -> None:
        """Reduce all buckets, if no micro-batch did since the window began.

        Raises:
            RuntimeError: One did, and a gradient came outside of it.
        """
        if not self.micro_batches:
            Exchanges.run(
                lambda bucket=bucket: bucket.reduce(release=True)  # type: ignore[misc]
                for bucket in (*self._eager, *self._late)
            )
            return
        for bucket in (*self._eager, *self._late):
            for param in bucket.params:
                if param.grad is not None:
                    raise RuntimeError(
                        f"{self._names[param]} got a gradient outside of optimizer.backward, in a window that used it: "
                        "with shard_gradients=True all micro-batches of a window go through optimizer.backward, or none"
                    )

    def remove_hooks(self) -> None:
        """Leave the parameters' gradients alone from now on."""
        for hook in self._hooks:
            hook.remove()


def _weak_hook(reducer: BackwardReducer) -> Callable[[Tensor], None]:
    reference = weakref.ref(reducer)

    def hook(param: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive._arrived(param)

    return hook
