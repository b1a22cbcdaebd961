"""Which conversations are open: memory that is short goes to them, so their blocks of KV are evicted last.

A conversation is open while it has a session's name, or once it *came back*: a request began with all that an earlier
one had left. What was asked once may never be asked again. A share of all blocks is not theirs, so that new ones can
begin; of theirs, those of the conversation that went on last, and the first ones of each, stay longest.
"""

from collections import OrderedDict
from collections.abc import Iterator

from splitinfer.core.kv.block_tree import Block, BlockTree, Key
from splitinfer.core.sequence import Sequence

_SHARE = 0.75  # of all blocks, at most


class OpenConversations:
    """The last block of each, by its session's name or its own key; at most ``most``, those that went on last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._last: OrderedDict[str | Key, Block] = OrderedDict()

    def __iter__(self) -> Iterator[str | Key]:
        return iter(self._last)

    def __len__(self) -> int:
        return len(self._last)

    def ended(self, seq: Sequence) -> None:
        """A request with stored blocks has ended."""
        last = seq.kv.blocks[-1]
        last.ends = True
        if seq.session is None and not seq.comes_back:
            return
        name = last.key if seq.session is None else seq.session
        self._last[name] = last
        self._last.move_to_end(name)
        for gone in [one for one, block in self._last.items() if not block.is_here]:
            del self._last[gone]  # it protects nothing, and would keep the blocks before it alive
        while len(self) > self._most:
            nameless = (one for one in self._last if not isinstance(one, str))
            del self._last[next(nameless, next(iter(self._last)))]  # a name is a promise that it can be dropped

    def close(self, session: str) -> Block | None:
        """Forget a session; its last block, if it is there."""
        last = self._last.pop(session, None)
        return last if last is not None and last.is_here else None

    def clear(self) -> None:
        """Forget all."""
        self._last.clear()

    def evictable(self, tree: BlockTree) -> Iterator[Block]:
        """The blocks of a tree in the order in which they may be evicted. Changes nothing."""
        are_last = self._blocks(int(_SHARE * len(tree)))
        yield from (block for block in tree.evictable() if block not in are_last)
        yield from (block for block in tree.evictable() if block in are_last)

    def _blocks(self, most: int) -> set[Block]:
        """So many of their blocks; with each all before it, which cannot be evicted earlier."""
        found = set[Block]()
        for last in reversed(self._last.values()):
            path, at = list[Block](), last if last.is_here else None
            while at is not None and at not in found:
                path.append(at)
                at = at.parent
            found.update(path[::-1][: most - len(found)])
            if len(found) >= most:
                break
        return found
