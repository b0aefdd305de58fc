"""`ReplayIndex`: which committed groups exist, and in which orders the ready ones stand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter

from sc_core.digest import MODULUS, group_digest
from sc_core.ordered import Key, OrderedKeys
from sc_core.records import Group, GroupId

_UNTARGETED = -1  #: stands for "no target step" in a key; targets count from 0
_commit_seq = attrgetter("commit_seq")


class ReplayIndex:
    """Committed groups, each ready or selected; an `IndexView` of the ready ones.

    Everything is synchronous. A call that raises has changed nothing. Taking k of n groups
    costs O(k log n), finding the m that share a version or a target O(log n + m). The
    iterators are lazy: collect what they yield before changing the index.
    """

    def __init__(self) -> None:
        # Invariant: each order has one key, ending in the ordinal, per group that is not selected.
        self._groups: dict[int, Group] = {}
        self._ordinals: dict[GroupId, int] = {}
        self._digests: dict[int, int] = {}
        self._selected: set[int] = set()
        self._by_commit = OrderedKeys()
        self._by_version = OrderedKeys()
        self._by_target = OrderedKeys()
        self.digest = 0  #: of all groups, ready or selected; see `sc_core.digest`

    def __repr__(self) -> str:
        return f"<ReplayIndex {self.ready_count} ready, {self.selected_count} selected>"

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._ordinals

    def get(self, group_id: GroupId) -> Group | None:
        ordinal = self._ordinals.get(group_id)
        return None if ordinal is None else self._groups[ordinal]

    def groups(self) -> tuple[Group, ...]:
        """All groups, ready or selected, in commit order."""
        return tuple(sorted(self._groups.values(), key=_commit_seq))

    def is_selected(self, group_id: GroupId) -> bool:
        return self._ordinals.get(group_id) in self._selected

    @property
    def ready_count(self) -> int:
        return len(self._by_commit)

    @property
    def selected_count(self) -> int:
        return len(self._selected)

    # changes --------------------------------------------------------------------------

    def add(self, group: Group) -> None:
        """Put in a group; it is ready.

        Raises:
            ValueError: its id, or another attempt at its prompt, is there already.
        """
        if group.ordinal in self._groups or group.group_id in self._ordinals:
            there = self._groups[self._ordinals.get(group.group_id, group.ordinal)]
            raise ValueError(
                f"group {group.group_id} of prompt {group.ordinal} can't be added: the index"
                f" has group {there.group_id} of prompt {there.ordinal}"
            )
        digest = group_digest(group)  # first, as it refuses what msgpack can't hold
        self._groups[group.ordinal] = group
        self._ordinals[group.group_id] = group.ordinal
        self._digests[group.ordinal] = digest
        self._enter_orders(group)
        self.digest = (self.digest + digest) % MODULUS

    def select(self, groups: Iterable[Group]) -> None:
        """Ready to selected.

        Raises:
            KeyError, ValueError: one of them is not in the index, or not ready.
        """
        for group in self._all_known(groups, selected=False):
            self._leave_orders(group)
            self._selected.add(group.ordinal)

    def unselect(self, groups: Iterable[Group]) -> None:
        """Selected to ready, each in its old place in every order.

        Raises:
            KeyError, ValueError: one of them is not in the index, or not selected.
        """
        for group in self._all_known(groups, selected=True):
            self._selected.remove(group.ordinal)
            self._enter_orders(group)

    def remove(self, group_id: GroupId) -> Group:
        """Take out a group, ready or selected.

        Raises:
            KeyError: it is not in the index.
        """
        group = self._known(group_id)
        if group.ordinal in self._selected:
            self._selected.remove(group.ordinal)
        else:
            self._leave_orders(group)
        del self._groups[group.ordinal], self._ordinals[group_id]
        self.digest = (self.digest - self._digests.pop(group.ordinal)) % MODULUS
        return group

    def replace(self, group: Group) -> None:
        """Put in a changed group in the place of the one with its id; ready stays ready.

        Raises:
            KeyError: its id is not in the index.
            ValueError: that id belongs to another prompt.
        """
        old = self._known(group.group_id)
        if old.ordinal != group.ordinal:
            raise ValueError(
                f"group {group.group_id} is of prompt {old.ordinal}, not {group.ordinal}"
            )
        digest = group_digest(group)
        change = digest - self._digests[group.ordinal]
        if group.ordinal not in self._selected:
            self._leave_orders(old)
            self._enter_orders(group)
        self._groups[group.ordinal] = group
        self._digests[group.ordinal] = digest
        self.digest = (self.digest + change) % MODULUS

    # ready groups ---------------------------------------------------------------------

    def ready_in_commit_order(self) -> Iterator[Group]:
        return self._at(self._by_commit)

    def ready_of_target(self, step: int | None) -> Iterator[Group]:
        """By start version, then ordinal; None: those without a target."""
        return self._at(self._by_target.beginning(_UNTARGETED if step is None else step))

    def ready_of_version(self, version: int) -> Iterator[Group]:
        """By ordinal."""
        return self._at(self._by_version.beginning(version))

    def oldest_ready_version(self) -> int | None:
        first = self._by_version.first()
        return None if first is None else first[0]

    def ready_versions(self) -> tuple[int, ...]:
        """Start versions that ready groups have, ascending."""
        return tuple(self._by_version.heads())

    def ready_targets(self) -> tuple[int, ...]:
        """Target steps that ready groups have, ascending."""
        return tuple(head for head in self._by_target.heads() if head != _UNTARGETED)

    def _at(self, keys: Iterable[Key]) -> Iterator[Group]:
        for key in keys:
            yield self._groups[key[-1]]

    def _enter_orders(self, group: Group) -> None:
        for order, key in self._keys(group):
            order.add(key)

    def _leave_orders(self, group: Group) -> None:
        for order, key in self._keys(group):
            order.remove(key)

    def _keys(self, group: Group) -> tuple[tuple[OrderedKeys, Key], ...]:
        target = _UNTARGETED if group.target_step is None else group.target_step
        version, ordinal = group.start_weight_version, group.ordinal
        return (
            (self._by_commit, (group.commit_seq, ordinal)),
            (self._by_version, (version, ordinal)),
            (self._by_target, (target, version, ordinal)),
        )

    def _known(self, group_id: GroupId) -> Group:
        if group_id not in self._ordinals:
            raise KeyError(f"group {group_id} is not in the index")
        return self._groups[self._ordinals[group_id]]

    def _all_known(self, groups: Iterable[Group], *, selected: bool) -> list[Group]:
        """The index's own copy of each of `groups`, all of them in the given state."""
        known: dict[GroupId, Group] = {}
        for group in groups:
            if group.group_id in known:
                raise ValueError(f"group {group.group_id} was given twice")
            known[group.group_id] = self._known(group.group_id)
            if self.is_selected(group.group_id) is not selected:
                state = "ready" if selected else "selected"
                raise ValueError(f"group {group.group_id} is {state} already")
        return list(known.values())
