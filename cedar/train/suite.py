"""The whole evaluation of a model: text, known entropies, retrieval by depth and length, indexers, switches, replay.

One dictionary of plain values; `page.py` makes a page of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cedar.chat.tokenizer import BOS, EOS, Tokenizer
from cedar.config.rounding import Rounding
from cedar.errors import ConfigError
from cedar.model.transformer import Transformer
from cedar.train import evaluate
from cedar.train.corpus import Corpus
from cedar.train.measure import Meter, Scores, answers_only, decoder_floor, rows
from cedar.train.sample import Sample
from cedar.train.tasks import Lookup, Tasks

# documents of the evaluation never come from a training seed
_SEED = 0xE5A1
_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_NEEDLES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        lengths: Tokens of the retrieval documents.
        tokens: Tokens of text, and of each generated task, that are scored.
        documents: Retrieval documents of each length and kind; fewer where they are long.
        most_tokens: Tokens that all retrieval documents of one length and kind may have together.
        offset_step: Replay is measured at every so manieth offset of the window, and at its last.
    """

    lengths: tuple[int, ...]
    tokens: int
    documents: int
    most_tokens: int
    offset_step: int = 1

    def count(self, length: int) -> int:
        """Documents of a length, at least one."""
        return max(1, min(self.documents, self.most_tokens // length))


QUICK = Effort(lengths=(256, 1024), tokens=4096, documents=4, most_tokens=4096, offset_step=8)
# one long document costs minutes on a CPU and seconds on a GPU
CPU = Effort(lengths=(512, 1024, 2048, 4096, 8192, 16384), tokens=32768, documents=10, most_tokens=20480, offset_step=4)
GPU = Effort(
    lengths=(512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
    tokens=131072,
    documents=20,
    most_tokens=163840,
)


class Suite:
    """Runs the measurements of one model, in order, and tells how far it is.

    Args:
        facts: The model's `training.json`; empty where it has none.
        validation: Held-out corpora by name; may be empty.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        facts: Mapping[str, Any],
        validation: Mapping[str, Corpus],
        effort: Effort,
        *,
        report: Callable[[str], None] = print,
    ) -> None:
        self.model, self.tokenizer, self.facts, self.validation = model, tokenizer, facts, validation
        self.effort, self.report = effort, report
        self.window = model.config.attention.sliding_window
        self.trained = int(facts.get("trained_length", 512))
        held_out = int(facts.get("held_out_names", 8))
        self.tasks = Tasks(tokenizer, {}, held_out=held_out, window=self.window)
        self.meter = Meter(model)
        self.started_s = time.monotonic()

    def run(self, save: Callable[[dict[str, Any]], None] = lambda results: None) -> dict[str, Any]:
        """Every measurement; values are plain, so that they go to JSON as they are.

        Args:
            save: Gets the results so far after each: the whole takes minutes.
        """
        steps: tuple[tuple[str, Callable[[], Any]], ...] = (
            ("text", self.text),
            ("chats", self.chats),
            ("language", self.language),
            ("exercises", self.exercises),
            ("indexers", self.indexers),
            ("switches", self.switches),
            ("replay", self.replay),
            ("queries", lambda: self.queries("mqar")),
            ("bare_queries", lambda: self.queries("mqar_bare")),
            ("passkey", self.passkey),
            ("needles", self.needles),
            ("recall", self.recall),
        )
        results: dict[str, Any] = {"model": self.about()}
        for number, (name, step) in enumerate(steps, start=1):
            self.tell(f"{number}/{len(steps)} {name}")
            results[name] = step()
            results["seconds"] = round(time.monotonic() - self.started_s, 1)
            save(results)
        return results

    def tell(self, line: str) -> None:
        self.report(f"{time.monotonic() - self.started_s:7.1f} s  {line}")

    def about(self) -> dict[str, Any]:
        device = torch.cuda.get_device_name(self.model.device) if self.model.device.type == "cuda" else "a CPU"
        return {
            "preset": self.facts.get("recipe", {}).get("preset"),
            "trained_length": self.facts.get("trained_length"),
            "window": self.window,
            "reach_of_windows": evaluate.reach(self.model),
            "topk": self.model.config.indexer.topk,
            "layers": self.model.config.num_layers,
            "device": device,
            "dtype": str(self.model.dtype).removeprefix("torch."),
        }

    # losses

    def text(self) -> dict[str, Any]:
        """Bits per byte of each held-out corpus of texts, in runs of the trained length."""
        return {
            name: evaluate.text(
                self.model,
                self.tokenizer,
                corpus,
                length=self.trained,
                max_tokens=max(self.effort.tokens, self.trained),
                rows=self.meter.at_once(self.trained),
            )
            for name, corpus in self.validation.items()
            if corpus.learn is None
        }

    def chats(self) -> dict[str, Any]:
        """Loss of what the assistant says in each held-out corpus of chats."""
        found = {}
        for name, corpus in self.validation.items():
            if corpus.learn is None:
                continue
            samples = self._chats(corpus, max(4, self.effort.tokens // 256))
            scores = self.meter.score(samples)
            exact = self._exact(samples)
            found[name] = {"nats": scores.ce, "token_accuracy": scores.accuracy, **exact}
        return found

    def _chats(self, corpus: Corpus, count: int) -> list[Sample]:
        assert corpus.learn is not None
        samples = []
        for document in range(min(count, corpus.num_documents)):
            start, stop = corpus.starts[document], corpus.starts[document + 1]
            learn = np.array(corpus.learn[start:stop])
            edges = np.flatnonzero(np.diff(np.concatenate([[False], learn, [False]]).astype(np.int8)))
            answers = tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
            samples.append(Sample(np.array(corpus.tokens[start:stop]), learn, answers))
        # like lengths together: a row is as wide as the longest of its batch
        return sorted(samples, key=lambda sample: len(sample.ids))

    def _exact(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Answers whose every token is the likeliest: what greedy decoding gives exactly."""
        right = total = 0
        for part in self.meter.batches(samples):
            ids_BS, _ = rows(part, self.model.device)
            likeliest_BS = self.meter.forward(ids_BS).logits_BSV.argmax(-1)
            hits = (likeliest_BS[:, :-1] == ids_BS[:, 1:]).cpu().numpy()
            for row, sample in enumerate(part):
                for start, stop in sample.answers:
                    right += bool(hits[row, start - 1 : stop - 1].all())
                    total += 1
        return {"exact_answers": right / max(1, total), "answers": total}

    def _samples(self, source: str, length: int, count: int) -> list[Sample]:
        maker = self.tasks.maker(source)
        made = (maker(np.random.default_rng((_SEED, length, number)), length) for number in range(count))
        return [sample for sample in made if sample is not None]

    def language(self) -> dict[str, Any]:
        """Loss on unseen documents of the n-gram language above what the best predictor pays for the same words."""
        length = self.trained
        samples = self._samples("ngram", length, max(2, self.effort.tokens // length))
        known = [self.tasks.language.entropy(sample.ids) for sample in samples]
        ideal = float(np.concatenate([surprisal for _, surprisal in known]).mean())
        entropy = float(np.concatenate([entropy for entropy, _ in known]).mean())
        scores = self.meter.score(samples)
        return {
            "nats": scores.ce,
            "entropy": entropy,
            "ideal": ideal,
            "excess": scores.ce - ideal,
            "tokens": len(scores.nats),
            "documents": len(samples),
            "length": length,
        }

    def exercises(self) -> dict[str, Any]:
        """Sums with steps and template code: token accuracy, and whole answers."""
        found: dict[str, Any] = {}
        for source in ("arithmetic", "code"):
            samples = self._samples(source, min(512, self.trained), max(2, self.effort.tokens // 2048))
            scores = self.meter.score(samples)
            found[source] = {"nats": scores.ce, "token_accuracy": scores.accuracy}
            if source == "arithmetic":
                found[source] |= self._exact(samples)
        return found

    # mechanisms

    def _mixed(self, length: int, count: int) -> list[Sample]:
        """Text, restated records and lookups, of which answers alone count in the last."""
        samples = self._samples("restate", length, count)
        samples += [answers_only(sample) for sample in self._samples("lookup", length, count)]
        return samples + self._text_samples(length, count)

    def _text_samples(self, length: int, count: int) -> list[Sample]:
        corpus = next((c for c in self.validation.values() if c.learn is None), None)
        if corpus is None:
            return self._samples("ngram", length, count)
        bos, end = self.tokenizer.special[BOS], self.tokenizer.special[EOS]
        run = length - 1
        count = min(count, len(corpus.tokens) // run)
        learn = np.ones(length, np.bool_)
        learn[0] = False
        samples = []
        for number in range(count):
            text = np.array(corpus.tokens[number * run : (number + 1) * run])
            samples.append(
                Sample(np.concatenate([[bos], text]).astype(np.uint16), learn & (np.append(bos, text) != end))
            )
        return samples

    def _length(self) -> int:
        """Of the documents that mechanisms are compared on: long, but within what was trained."""
        return min(1024, self.trained)

    def indexers(self) -> dict[str, Any]:
        """Recall of dense attention's best 8 entries by layer, and the experts' load."""
        count = max(2, self.effort.tokens // 8 // self._length())
        found = {
            name: asdict(self.meter.indexers(samples))
            for name, samples in {
                "lookups": self._samples("lookup", self._length(), count),
                "queries": self._samples("mqar", self._length(), count),
                "text": self._text_samples(self._length(), count),
            }.items()
        }
        found["all"] = asdict(self.meter.indexers(self._recipe(self._length(), 4 * count * self._length())))
        return found

    def _recipe(self, length: int, num_tokens: int) -> list[Sample]:
        """Held-out samples in the mixture of the recipe's last stage: load is even over what was trained together."""
        tasks = Tasks(self.tokenizer, dict(self.validation), held_out=self.tasks.held_out, window=self.window)
        stages = self.facts.get("recipe", {}).get("stages") or [{"mixture": {"restate": 0.5, "lookup": 0.5}}]
        mixture = {name: weight for name, weight in stages[-1]["mixture"].items() if name in tasks.sources}
        samples: list[Sample] = []
        for source, weight in mixture.items():
            wanted, number = num_tokens * weight / sum(mixture.values()), 0
            while wanted > 0:
                sample = tasks.maker(source)(np.random.default_rng((_SEED, length, number)), length)
                number += 1
                wanted -= length if sample is None else len(sample.ids)
                samples += [] if sample is None else [sample]
        # like lengths together: a row is as wide as the longest of its batch
        return sorted(samples, key=lambda sample: len(sample.ids))

    def switches(self) -> dict[str, Any]:
        """Loss and retrieval as it serves, and with one mechanism off at a time, on the same tokens."""
        samples = self._mixed(self._length(), max(2, self.effort.tokens // 6 // self._length()))
        own = self.model.rounding
        found = {"as it serves": self._told(samples, {})}
        for name, off in {
            "FP4 entries and index keys off": ("main_kv", "index"),
            "FP4 entries off": ("main_kv",),
            "FP4 index keys off": ("index",),
            "FP8 windows off": ("window_kv",),
            "FP8 activations off": ("activations",),
        }.items():
            found[name] = self._told(samples, {"rounding": replace(own, **dict.fromkeys(off, False))})
        with self.meter.without_pool():
            found["candidate pool off"] = self._told(samples, {})
            found["FP4 and candidate pool off"] = self._told(
                samples, {"rounding": replace(own, main_kv=False, index=False)}
            )
        found["every rounding off"] = self._told(samples, {"rounding": Rounding.none()})
        found["every entry attended"] = self._told(samples, {"topk": "all"})
        torch.manual_seed(0)
        found["random entries"] = self._told(samples, {"selection": "random"})
        serving = found["as it serves"]
        for values in found.values():
            values["costs"] = serving["nats"] - values["nats"]
        return found

    def _told(self, samples: Sequence[Sample], mode: Mapping[str, Any]) -> dict[str, float]:
        scores = self.meter.score(samples, mode)
        return {"nats": scores.ce, "token_accuracy": scores.accuracy}

    def replay(self) -> dict[str, Any]:
        """What replay costs the first 64 tokens by the cut's offset in the window; FP4, pool and replay together."""
        length, window = self._length(), self.window
        cut = length // 2
        samples = self._mixed(length, max(2, self.effort.tokens // 16 // length))
        offsets = sorted({*range(0, window, self.effort.offset_step), window - 1})
        result = {
            "decoder": asdict(self.meter.decoder_replay(samples, cut, offsets=tuple(offsets))),
            "encoder": asdict(self.meter.encoder_replay(samples, cut, offsets=tuple(o for o in offsets if o % 2 == 0))),
            "cut": cut,
            "first_tokens": 64,
        }
        result["together"] = self._together(samples, cut)
        return result

    def _together(self, samples: Sequence[Sample], cut: int) -> dict[str, float]:
        """FP4, pool and decoder replay on against all three off, on the tokens after the cut."""
        served, plain = Scores(), Scores()
        for part in self.meter.batches(samples):
            ids_BS, target_BS = rows(part, self.model.device)
            target_BS[:, :cut] = -1
            floor_BS = decoder_floor(ids_BS, cut, self.window)
            served.add(self.meter.forward(ids_BS, window_floor_BS=floor_BS).logits_BSV, target_BS)
            with self.meter.without_pool():
                off = replace(self.model.rounding, main_kv=False, index=False)
                plain.add(self.meter.forward(ids_BS, rounding=off).logits_BSV, target_BS)
        return {"serving": served.ce, "off": plain.ce, "costs": served.ce - plain.ce}

    # retrieval by length

    def queries(self, task: str) -> list[dict[str, Any]]:
        """Many queries of random pairs (MQAR, in one of its forms), whole sequences at once: up to 4,096 tokens."""
        found = []
        for length in self.effort.lengths:
            if length > 4096:
                break
            samples = self._samples(task, length, max(2, self.effort.count(length)))
            distances = [(start, self._distance(s, start)) for s in samples for start, _ in s.answers]
            scores = self.meter.score(samples)
            beyond = [r for r, (_, d) in zip(scores.right, distances, strict=True) if d > self.window]
            found.append(
                {
                    "length": length,
                    "accuracy": scores.accuracy,
                    "beyond_window": sum(beyond) / max(1, len(beyond)),
                    "questions": len(scores.right),
                }
            )
            self.tell(f"  {length} tokens: {scores.accuracy:.1%} of {len(scores.right)}")
        return found

    @staticmethod
    def _distance(sample: Sample, start: int) -> int:
        """Tokens from an answer back to the first mention of its key."""
        return start - int(np.flatnonzero(sample.ids == sample.ids[start - 1])[0])

    def passkey(self) -> list[dict[str, Any]]:
        """Exact answers for one five-digit key by length and depth, through prefill and decode."""
        found = []
        for length in self.effort.lengths:
            count = self.effort.count(length)
            depths = _DEPTHS if count > 1 else (0.0, 0.5, 0.9)
            by_depth = {}
            for depth in depths:
                numbers = range(max(1, count // 2))
                by_depth[f"{depth:g}"] = self.passkey_at(length, depth, numbers)
            found.append(self._by_length(length, by_depth))
        return found

    def passkey_at(self, length: int, depth: float, numbers: Iterable[int]) -> dict[str, float]:
        """The answers about the keys of some documents, which `numbers` draw."""
        seeds = [np.random.default_rng((_SEED, length, int(100 * depth), number)) for number in numbers]
        return self._asked([self.tasks.passkey_document(seed, length, depth=depth, own_filler=True) for seed in seeds])

    def _by_length(self, length: int, by_depth: dict[str, dict[str, float]]) -> dict[str, Any]:
        total = sum(values["questions"] for values in by_depth.values())
        exact = sum(values["exact"] * values["questions"] for values in by_depth.values()) / total
        self.tell(f"  {length} tokens: {exact:.1%} of {total:g}")
        return {"length": length, "exact": exact, "questions": int(total), "by_depth": by_depth}

    def _asked(self, lookups: Sequence[Lookup]) -> dict[str, float]:
        answers = [
            answer
            for lookup in lookups
            for answer in evaluate.ask(self.model, self.tokenizer, lookup, selection="learned")
        ]
        tokens = sum(answer.num_tokens for answer in answers)
        return {
            "exact": sum(answer.exact for answer in answers) / len(answers),
            "tokens": sum(answer.right_tokens for answer in answers) / tokens,
            "questions": len(answers),
        }

    def needles(self) -> list[dict[str, Any]]:
        """Three records asked for at once, by length."""
        far = evaluate.reach(self.model)
        found = []
        for length in self.effort.lengths:
            if length < 2 * far:
                continue
            lookups = [
                self.tasks.needles_document(
                    np.random.default_rng((_SEED, length, number)),
                    length - 40,
                    count=_NEEDLES,
                    held_out=True,
                    skip_last=far,
                )
                for number in range(self.effort.count(length))
            ]
            values = self._asked(lookups)
            self.tell(f"  {length} tokens: {values['exact']:.1%} of {values['questions']:g}")
            found.append({"length": length, **values})
        return found

    def recall(self) -> list[dict[str, Any]]:
        """Lookups of held-out names beyond the reach of the windows, by length; the control at the first."""
        found: list[dict[str, Any]] = []
        for length in self.effort.lengths:
            try:
                result = evaluate.recall(
                    self.model,
                    self.tokenizer,
                    length=length,
                    count=self.effort.count(length),
                    held_out=self.tasks.held_out,
                    control=not found,
                )
            except ConfigError:
                # too short for a record beyond the reach of the windows
                continue
            self.tell(f"  {length} tokens: {result['accuracy']:.1%} of {result['questions']}")
            found.append(result)
        return found


def effort_for(device: str, *, quick: bool, lengths: Sequence[int] = ()) -> Effort:
    """The usual effort on a device, with the lengths replaced if any are given.

    Raises:
        ConfigError: A length is too short to hold a question.
    """
    effort = QUICK if quick else GPU if device == "cuda" else CPU
    if short := [length for length in lengths if length < 128]:
        raise ConfigError(f"a length of {short[0]} tokens has no room for a text and a question; expected at least 128")
    return replace(effort, lengths=tuple(sorted(set(lengths)))) if lengths else effort


def load_validation(folder: str | Path, tokenizer: Tokenizer) -> dict[str, Corpus]:
    """The held-out corpora of a data folder, `stories` first. Raises FormatError."""
    from cedar.train.data import load_corpora

    found = load_corpora(folder, tokenizer, "validation")
    return dict(sorted(found.items(), key=lambda item: (item[0] != "stories", item[0])))
