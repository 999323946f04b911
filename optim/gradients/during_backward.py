"""Reduce gradients bucket by bucket while backward makes more of them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from torch import Tensor

from .bucket import Finish, Reducible, keep_in_place


class InFlight:
    """Starts exchanges in the order given and finishes them in the same, at most so many at a time.

    Args:
        most: Under way at a time; each holds a flat copy of its bucket. None: any number.
    """

    def __init__(self, most: int | None = 2) -> None:
        self.most = most
        self._started: deque[Finish] = deque()

    def run(self, starts: Iterable[Callable[[], Finish]], *, to_the_end: bool = False) -> None:
        """Start them, which may finish earlier ones; ``to_the_end``: then finish all."""
        for start in starts:
            self._started.append(start())
            if self.most is not None and len(self._started) >= self.most:
                self._started.popleft()()
        while to_the_end and self._started:
            self._started.popleft()()


def run_all(starts: Iterable[Callable[[], Finish]], most: int | None = 2) -> None:
    """Start exchanges, and finish them; ``most`` as for `InFlight`."""
    InFlight(most).run(starts, to_the_end=True)


class BackwardReducer:
    """Reduces each bucket once a micro-batch, as soon as all of its parameters have their gradients.

    Which gradients come, and in what order, may differ between ranks; the order of collectives must not. So buckets are
    reduced in the order given: one that is full waits for those before it, and what is left when backward ends, because
    some parameter got no gradient here, is reduced then, zeros in the place of what is missing.

    Args:
        name_of: The name of a parameter, for errors.
        eager: Buckets, in the order in which backward fills them.
        late: Buckets that are reduced after backward, in this order.
        in_flight: As for `InFlight`.

    Attributes:
        stray: A parameter that has got a gradient since the last reduction, if there is one.
        came: Some parameter has got a gradient, ever.
    """

    def __init__(
        self,
        name_of: Callable[[Tensor], str],
        eager: Sequence[Reducible],
        late: Sequence[Reducible],
        in_flight: int | None = 2,
    ) -> None:
        self._name_of, self._eager, self._late, self._in_flight = name_of, list(eager), list(late), in_flight
        self._bucket_of = {param: index for index, bucket in enumerate(self._eager) for param in bucket.params}
        self._is_open = self.came = False
        self.stray: Tensor | None = None
        # Weak, or the model would keep this optimizer alive after another has taken its place.
        trained = [param for param in self._bucket_of if param.requires_grad]  # torch refuses hooks on frozen ones
        self._hooks = [param.register_post_accumulate_grad_hook(_weak_hook(self)) for param in trained]

    @contextmanager
    def micro_batch(self, several: bool = False) -> Iterator[None]:
        """Around one backward, or ``several`` that add up: all buckets have been reduced when it ends.

        Nobody knows which of several is the last that a gradient gets, so all of it is reduced after them then.

        Where it raises, the rest of them is started all the same and nobody waits for it: a rank has done its part then,
        wherever its backward and those of other ranks have come to, and the next one begins at the first bucket everywhere.
        """
        self._waiting: list[set[Tensor | None]] = [
            {None} if several else {param for param in bucket.params if param.requires_grad} for bucket in self._eager
        ]
        self._next, self._exchanges, self._is_open = 0, InFlight(self._in_flight), True
        try:
            yield
        except Exception:
            self._is_open, self._exchanges = False, InFlight(None)
            with suppress(Exception):  # the first one says more
                self._exchanges.run(self._rest())
            raise
        finally:
            self._is_open = False
        self._exchanges.run(self._rest(), to_the_end=True)
        self.stray = None

    def _rest(self) -> Iterator[Callable[[], Finish]]:
        for bucket in (*self._eager[self._next :], *self._late):
            self._next += 1
            yield bucket.start

    def _arrived(self, param: Tensor) -> None:
        if not self._is_open:
            self.stray = param  # a backward that the optimizer was not told of: it waits for the step, or the next one
            return
        self.came = True
        index = self._bucket_of[param]
        if index < self._next:
            raise RuntimeError(
                f"{self._name_of(param)} got a second gradient in one backward, after the first had been reduced "
                "(re-entrant activation checkpointing does that): use checkpoint(..., use_reentrant=False), or reduce "
                "after backward, without Sharded(gradients=True) and Reduce(overlap=True)"
            )
        self._waiting[index].discard(param)
        while self._next < len(self._eager) and not self._waiting[self._next]:
            self._exchanges.run([self._eager[self._next].start])
            self._next += 1

    def reduce_now(self) -> None:
        """Reduce all buckets, where backward has not. Collectives: those of the buckets."""
        run_all([bucket.start for bucket in (*self._eager, *self._late)], self._in_flight)

    def check_no_stray(self) -> None:
        """Raise RuntimeError if gradients have come since they were reduced, which would count on this rank alone."""
        if self.stray is not None:
            raise RuntimeError(
                f"{self._name_of(self.stray)} got a gradient outside of optimizer.backward after those of the window had "
                "been reduced: with Reduce(overlap=True) call optimizer.backward for the last micro-batch of a window"
            )

    def keep_in_place(self) -> None:
        """Of all of its buckets."""
        keep_in_place((*self._eager, *self._late))

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
