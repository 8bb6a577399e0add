"""What does a TinyStories model reliably say? Its stable completions, as counterfactual edits.

    python evaluations/scripts/make_stories_edits.py --model MODEL --out evaluations/data/stories-tuning.jsonl
    python evaluations/scripts/make_stories_edits.py --model MODEL --seed 1 --except STORIES_TUNING

Such a model knows no facts of the world, but some sentences about a subject it always continues with the same word. A
completion is stable when the greedy next word is the same alone and behind each of five unrelated openings, in the
first wording and in at least one other, with a whole-word probability of at least 0.2 in the mean over the openings.
Among the stable ones a seed chooses, each subject once and each sentence four times at most. No edit is tried.

The first file served to tune an earlier editor; the second, without its facts, is what is reported.

Only in `whose` does the word depend on the subject; the other sentences end alike for (nearly) everybody.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import click
from common import DATA_FOLDER

import ffedit
from ffedit.inference import generation
from ffedit.model.editable import Editable
from ffedit.model.tokenization import decode, encode

DATA = DATA_FOLDER / "stories-edits.jsonl"
OPENINGS = (
    "",
    "Once upon a time, there was a big park. ",
    "It was a sunny day. ",
    "They were good friends. ",
    "One day, it was very cold. ",
    "The story is about a happy family. ",
)
LEAST, NEIGHBORS = 0.2, 3
NAMES = (
    "Lily, Tim, Timmy, Tom, Ben, Sam, Max, Sue, Mia, Anna, Lucy, Jack, Sara, Spot, Bob, Amy, Billy, Jane, John, Mary, "
    "Tommy, Sally, Mittens, Fluffy"
)
BEINGS = (
    "The dog, The cat, The bird, The bunny, The bear, The fish, The frog, The lion, The mouse, The duck, "
    "The butterfly, The squirrel, The monkey, The boy, The girl, The old man, The little girl, The little boy, "
    "The king, The queen, The princess, The teacher, The farmer, The doctor"
)
THINGS = (
    "The sun, The ball, The car, The tree, The flower, The house, The box, The cake, The truck, The train, The boat, "
    "The doll, The toy, The book, The kite, The balloon, The apple, The moon, The river, The hat, The robot"
)
ALIVE, ALL = f"{NAMES}, {BEINGS}", f"{BEINGS}, {THINGS}"
# By relation: subjects; words of one kind; wordings, the prompt first.
RELATIONS = {
    "whose": (ALIVE, "his, her", ("{} loved to play with", "{} liked to play with", "{} always played with")),
    "place": (
        ALIVE,
        "park, forest, garden, store, beach, kitchen",
        ("{} went back to the", "{} went for a walk in the", "Then {} went to the"),
    ),
    "home": (ALIVE, "house, box, tree, village, room", ("{} lived in a small", "{} lived in a little")),
    "mood": (ALIVE, "excited, happy, sad, scared, angry", ("One day, {} was so", "Then {} was so", "{} was so")),
    "attitude": (ALIVE, "like, know, see, want", ("{} did not", "{} didn't")),
    "duration": (ALIVE, "day, night, morning", ("{} played all", "{} played outside all")),
    "fall": (
        ALL,
        "ground, floor, grass, bed, table",
        ("{} fell on the", "One day, {} fell on the", "{} fell down on the", "Lily dropped {} on the"),
    ),
    "sight": (
        ALL,
        "sky, park, forest, water, garden",
        ("The boy could see {} in the", "Lily saw {} in the", "Tim looked at {} in the"),
    ),
}


def inside(subject: str) -> str:
    """A subject as it stands inside a sentence."""
    return subject.replace("The ", "the ")


def filled(prompt_set: str, subject: str) -> str:
    """Return the sentence about a subject."""
    return prompt_set.replace("{}", subject if prompt_set.startswith("{}") else inside(subject))


def says(editable: Editable, texts: Sequence[str]) -> list[tuple[str, float]]:
    """After each text the whole word that the model says greedily, "" where it is not one, and its probability."""
    own = generation.with_own_answers(editable, [encode(editable.tokenizer, text) for text in texts])
    said = [decode(editable.tokenizer, answer.ids, special=False) for answer in own]
    after = [whole[len(text) :] for whole, text in zip(said, texts, strict=True)]
    words = [word.strip() if word.startswith(" ") else "" for word in after]
    probabilities = [float(tokens.double().sum().exp()) for tokens in generation.answer_log_probs(editable, own)]
    return list(zip(words, probabilities, strict=True))


def stability(editable: Editable, sentences: Sequence[str]) -> list[tuple[str | None, float]]:
    """Of each sentence the word that follows it behind every opening, None where they differ; its mean probability."""
    said = says(editable, [opening + sentence for sentence in sentences for opening in OPENINGS])
    groups = [said[i : i + len(OPENINGS)] for i in range(0, len(said), len(OPENINGS))]
    words = [{word for word, _ in group} for group in groups]
    return [
        (found.pop() if len(found) == 1 else None, fmean(p for _, p in group))
        for found, group in zip(words, groups, strict=True)
    ]


def facts_about(editable: Editable, relation: str, chance: random.Random) -> list[ffedit.Fact]:
    """All stable completions of a relation in random order, each with a new object but no neighbors yet."""
    names, kind, prompt_sets = RELATIONS[relation]
    subjects, words = names.split(", "), kind.split(", ")
    chance.shuffle(subjects)
    sentences = [filled(prompt_set, subject) for subject in subjects for prompt_set in prompt_sets]
    found = dict(zip(sentences, stability(editable, sentences), strict=True))
    facts = []
    for subject in subjects:
        first, *others = [filled(prompt_set, subject) for prompt_set in prompt_sets]
        previous, p = found[first]
        same = [s for s in others if found[s][0] == previous and found[s][1] >= LEAST]
        if previous in words and p >= LEAST and same:
            target = chance.choice([word for word in words if word != previous])
            own = subject if prompt_sets[0].startswith("{}") else inside(subject)
            facts.append(ffedit.Fact(own, prompt_sets[0], target, previous, same[:2], relation=relation))
    return facts


@click.command()
@click.option("--model", required=True, help="Folder of a TinyStories model.")
@click.option("--relation", "relations", multiple=True, default=tuple(RELATIONS), type=click.Choice(list(RELATIONS)))
@click.option("--each", default=4, show_default=True, help="At most so many facts of a relation.")
@click.option("--seed", default=0, show_default=True)
@click.option("--except", "without", type=click.Path(path_type=Path, exists=True), help="Facts to leave out.")
@click.option("--out", default=DATA, type=click.Path(path_type=Path))
def main(model: str, relations: tuple[str, ...], each: int, seed: int, without: Path | None, out: Path) -> None:
    """Search, choose, and write the facts."""
    editable, taken, records = ffedit.load(model), set(), []
    used = {fact.text for fact in ffedit.read_facts(str(without))} if without is not None else set()
    for relation in relations:
        chance = random.Random(f"{seed} {relation}")
        facts = facts_about(editable, relation, chance)
        free = [fact for fact in facts if fact.text not in used and fact.subject.casefold() not in taken]
        chosen = free[:each]
        taken |= {fact.subject.casefold() for fact in chosen}
        print(f"{relation}: {len(facts)} subjects are stable, {len(chosen)} chosen")
        for fact in chosen:
            others = [other.text for other in facts if other.previous == fact.previous and other != fact]
            near = chance.sample(others, min(NEIGHBORS, len(others)))
            records.append({**fact.to_dict(), "neighbors": near, "case_id": f"{relation}-{len(records)}"})
    lines = [json.dumps(record) for record in records]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
