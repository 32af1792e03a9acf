"""A random language whose entropy is known: what a model's loss on it exceeds is the model's own fault.

A document is one topic's mark and then words. The next word's logits are the sum of three random tables: one
read at a hash of the last two words, one at the last word, one at the topic. Engram can learn the first, any
layer the second, and the third must be fetched from the document's start. Nothing here needs torch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cedar.chat.tokenizer import BOS, FIRST_TOKENS, LAST_TOKENS, Tokenizer
from cedar.errors import ConfigError
from cedar.train.sample import Sample

_WORDS = 32
_TOPICS = 8
_BUCKETS = 509
# standard deviations of the three tables' logits: words pairs, last word, topic
_SCALES = (2.0, 1.0, 1.0)
# the language is part of the task, not of a run: every run and every evaluation speaks the same
_SEED = 0x1A46


class NgramLanguage:
    """The language over one tokenizer's ids.

    Raises:
        ConfigError: The vocabulary has too few tokens that Engram can tell apart.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        rng = np.random.default_rng(_SEED)
        compressed = tokenizer.compressed_map()[0]
        ordinary = np.arange(len(FIRST_TOKENS), len(tokenizer) - len(LAST_TOKENS))
        # one token of each compressed id, so that no two words share their n-grams
        distinct = {compressed[token_id]: int(token_id) for token_id in rng.permutation(ordinary)}
        if len(distinct) < _WORDS + _TOPICS:
            raise ConfigError(
                f"{tokenizer.source} has {len(distinct)} tokens that differ without case and space, the n-gram "
                f"language needs {_WORDS + _TOPICS}; use a larger vocabulary"
            )
        ids = list(distinct.values())
        self.words = np.array(ids[:_WORDS])
        self.topics = np.array(ids[_WORDS : _WORDS + _TOPICS])
        self._bos = tokenizer.special[BOS]
        self._word_of = {token_id: word for word, token_id in enumerate(self.words.tolist())}
        self._topic_of = {token_id: topic for topic, token_id in enumerate(self.topics.tolist())}
        # index _WORDS stands for "no word yet"
        before, last = np.meshgrid(np.arange(_WORDS + 1), np.arange(_WORDS + 1), indexing="ij")
        bucket = (before * 7919 + last * 104729 + 31) % _BUCKETS
        pair_logits = _SCALES[0] * rng.standard_normal((_BUCKETS, _WORDS))[bucket]
        last_logits = _SCALES[1] * rng.standard_normal((_WORDS + 1, _WORDS))
        topic_logits = _SCALES[2] * rng.standard_normal((_TOPICS, 1, 1, _WORDS))
        logits = pair_logits + last_logits + topic_logits
        logits -= logits.max(-1, keepdims=True)
        self._log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        p = np.exp(self._log_p)
        self._entropy = -(p * self._log_p).sum(-1)
        self._cumulative = p.cumsum(-1)

    def sample(self, rng: np.random.Generator, length: int) -> Sample:
        """BOS, a topic's mark, and `length - 2` words; every word is learnt, the mark is not."""
        topic = int(rng.integers(_TOPICS))
        table = self._cumulative[topic]
        drawn = np.empty(length - 2, np.int64)
        before, last = _WORDS, _WORDS
        for place, chance in enumerate(rng.random(length - 2)):
            # the last edge may fall short of 1 by a rounding
            word = min(int(table[before, last].searchsorted(chance, side="right")), _WORDS - 1)
            drawn[place] = word
            before, last = last, word
        ids = np.concatenate([[self._bos, self.topics[topic]], self.words[drawn]]).astype(np.uint16)
        learn = np.ones(length, np.bool_)
        learn[:2] = False
        return Sample(ids, learn)

    def entropy(self, ids: npt.NDArray[np.uint16]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """(entropy of each word given all before it, its own -log p), nats, both [n - 2], of one whole document.

        The first is what the best predictor expects to pay at each place, the second what it pays there.
        """
        topic = self._topic_of[int(ids[1])]
        words = np.array([_WORDS, _WORDS, *(self._word_of[int(token_id)] for token_id in ids[2:])])
        before, last, word = words[:-2], words[1:-1], words[2:]
        return self._entropy[topic, before, last], -self._log_p[topic, before, last, word]
