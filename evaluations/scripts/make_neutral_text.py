"""Make the neutral text that ships with ffedit (`ffedit/inference/neutral.txt.gz`) for key statistics.

    python evaluations/scripts/make_neutral_text.py --model FOLDER [--rows N] --out ffedit/inference/neutral.txt.gz

SmolLM2-135M-Instruct (Apache 2.0) continues beginnings about many topics in many forms, by nucleus sampling with a
fixed seed. Texts that repeat themselves are dropped, and each text ends with a sentence. Neither topics nor forms were
chosen with any fact of an evaluation in view. The texts are written after each batch, and a second run resumes.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from pathlib import Path

import click
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

TOPICS = (
    """
the city of Lisbon | Hamburg's harbour | the railways of Japan | coffee farming in Ethiopia | the Andes | Marie
Curie | Johannes Kepler | Frida Kahlo | Nelson Mandela | Florence Nightingale | the Ottoman Empire | the Ming
dynasty | the Vikings | the Industrial Revolution | the French Revolution | the Silk Road | Ancient Egypt | the
Inca | Polynesian navigation | the Black Death | photosynthesis | plate tectonics | the periodic table | black
holes | the immune system | antibiotics | vaccines | the human heart | sleep | bees | whales | wolves |
mushrooms | oak trees | bamboo | rice | wheat | bread baking | cheese | olive oil | chocolate | tea | pasta |
curry | soup | football | tennis | chess | swimming | the Olympic Games | cycling | mountaineering | sailing |
jazz | opera | the violin | the piano | Mozart | Beethoven | the Beatles | hip hop | cinema | Charlie Chaplin |
Akira Kurosawa | theatre | Shakespeare | Jane Austen | Leo Tolstoy | Gabriel Garcia Marquez | poetry | fairy
tales | detective novels | science fiction | painting | Rembrandt | Claude Monet | sculpture | architecture |
bridges | cathedrals | skyscrapers | the Great Wall of China | Machu Picchu | Venice | Nairobi | Buenos Aires |
Toronto | Sydney | Mumbai | Istanbul | Moscow | Cairo | Mexico City | Stockholm | Warsaw | Seoul | Jakarta |
Lagos | Chicago | New Orleans | Alaska | Texas | Scotland | Bavaria | Sicily | Brittany | Andalusia | the Nile |
the Amazon | the Danube | the Mississippi | the Alps | the Sahara | Antarctica | coral reefs | rain forests |
deserts | volcanoes | earthquakes | hurricanes | rivers | glaciers | the Moon | Mars | Saturn | comets |
telescopes | satellites | rockets | aeroplanes | steam engines | bicycles | cars | ships | railways | electric
motors | batteries | solar panels | wind turbines | nuclear power | coal | steel | glass | paper | cotton | wool
| leather | plastic | concrete | computers | the internet | programming in Python | databases | operating
systems | Microsoft | Toyota | Siemens | Nokia | Boeing | IBM | banks | money | insurance | taxes | trade |
inflation | farming | fishing | forestry | mining | elections | parliaments | constitutions | the United Nations
| the European Union | courts | human rights | newspapers | radio | television | libraries | museums |
universities | kindergartens | learning to read | mathematics | prime numbers | triangles | probability |
statistics | logic | philosophy | Socrates | Immanuel Kant | Confucius | Buddhism | Islam | Christianity |
Judaism | Hinduism | Greek mythology | Norse mythology | festivals | weddings | funerals | clothes | hats |
shoes | gardens | roses | dogs | cats | horses | cows | sheep | chickens | eagles | owls | penguins | frogs |
snakes | spiders | butterflies | dinosaurs | fossils | archaeology | languages | Latin | Arabic | Chinese
characters | Swahili | translation | dictionaries | maps | clocks | calendars | weights and measures | Isaac
Newton | Albert Einstein | Charles Darwin | Ada Lovelace | Nikola Tesla | Galileo | Aristotle | Cleopatra |
Julius Caesar | Napoleon | Abraham Lincoln | Queen Victoria | Mahatma Gandhi | Simon Bolivar | Genghis Khan |
Sweden | Brazil | Vietnam | Kenya | Poland | Portugal | Canada | New Zealand | Iran | Greece | Peru | Morocco |
doctors | nurses | teachers | farmers | carpenters | sailors | soldiers | firefighters | judges | journalists |
grandmothers | children | neighbours | holidays | travelling by train | camping | hotels | restaurants | markets
| supermarkets | kitchens | houses | furniture | music lessons | birthdays | letters | friendship | honesty |
courage | fear | happiness | memory | dreams
""".strip()
    .replace("\n", " ")
    .split(" | ")
)
FORMS = (
    "{T} ",
    "In this article, we look at {t}. ",
    "The history of {t} begins ",
    'My uncle once told me about {t}. "',
    "A short introduction to {t}.\n\n",
    "Question: What should a visitor know about {t}?\nAnswer:",
    "Yesterday's newspaper carried a report on {t}: ",
    "Chapter 3. {T}\n\n",
    "According to a study of {t}, ",
    "When I was young, I knew nothing of {t}. ",
    "Three people who worked with {t} were ",
    "{T}: facts and figures.\n\n1.",
    "Dear Anna,\n\nthank you for your letter about {t}. ",
    "Unlike most others, {t} ",
    "From 1850 to 1950, {t} ",
    "The book describes {t}. Its author, ",
)
NEW = 144
BATCH = 96
TEMPERATURE, TOP_K, TOP_P = 0.9, 60, 0.95
# Number of SmolLM2's special tokens, which are not sampled, so that no text ends early.
SPECIAL = 20
# A text that zlib makes this many times smaller repeats itself.
REPEATS = 3.0


@click.command()
@click.option("--model", required=True)
@click.option("--rows", default=594, show_default=True, help="Number of texts, of about 140 tokens each.")
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(model: str, rows: int, dtype: str, out: Path) -> None:
    """Sample, keep, tidy, pack."""
    raw = out.with_suffix(".jsonl")
    written = len(raw.read_text(encoding="utf-8").splitlines()) if raw.exists() else 0
    prompts = beginnings()[:rows]
    if written < len(prompts):
        tokenizer = AutoTokenizer.from_pretrained(model)
        decoder = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        for first in range(written, len(prompts), BATCH):
            batch = prompts[first : first + BATCH]
            texts = [tokenizer.decode(new) for new in sampled(decoder, tokenizer, batch, seed=first)]
            with raw.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps([p, t]) + "\n" for p, t in zip(batch, texts, strict=True))
            print(f"{first + len(batch)} of {len(prompts)} texts", flush=True)
    pairs = [json.loads(line) for line in raw.read_text(encoding="utf-8").splitlines()]
    texts = [text for prompt, continuation in pairs if (text := tidy(prompt, continuation))]
    out.write_bytes(gzip.compress("\n\n".join(texts).encode(), 9, mtime=0))
    print(f"{len(texts)} of {len(pairs)} texts kept, {sum(map(len, texts)):,} characters")


def beginnings() -> list[str]:
    """Return beginnings about each topic in two forms, in a fixed order."""
    pairs = [(t, FORMS[i]) for n, t in enumerate(TOPICS) for i in (n % len(FORMS), (n * 7 + 5) % len(FORMS))]
    random.Random(0).shuffle(pairs)
    return [form.format(t=topic, T=topic[0].upper() + topic[1:]) for topic, form in pairs]


def tidy(prompt: str, continuation: str) -> str:
    """Return the text up to the end of its last sentence; "" if it is short or repeats itself."""
    text = prompt.rstrip(" ") + continuation
    text = text[: max(text.rfind(end) for end in (". ", ".\n", "! ", "? ")) + 1]
    raw = text.encode()
    return "" if len(raw) < 200 or len(raw) / len(zlib.compress(raw, 9)) > REPEATS else text


@torch.inference_mode()
def sampled(decoder: torch.nn.Module, tokenizer: object, prompts: list[str], seed: int) -> list[list[int]]:
    """Return continuations, [prompts][NEW] token ids; a line break precedes each prompt, as the attention sink."""
    generator = torch.Generator().manual_seed(seed)
    ids = [tokenizer("\n" + prompt.rstrip(" "))["input_ids"] for prompt in prompts]  # type: ignore[operator]
    width = max(map(len, ids))
    inputs = torch.tensor([[0] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    positions, cache, new = (mask.cumsum(1) - 1).clamp(min=0), DynamicCache(), []
    for _ in range(NEW):
        options = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache, "use_cache": True}
        hidden = decoder.model(input_ids=inputs, **options).last_hidden_state[:, -1]  # type: ignore[operator,union-attr]
        logits = decoder.lm_head(hidden).float() / TEMPERATURE  # type: ignore[operator]
        logits[:, :SPECIAL] = -torch.inf
        best, at = logits.topk(TOP_K, 1)
        chances = best.softmax(1)
        chances = chances * (chances.cumsum(1) - chances < TOP_P)
        inputs = at.gather(1, torch.multinomial(chances, 1, generator=generator))
        new.append(inputs)
        mask = torch.cat([mask, torch.ones_like(inputs)], 1)
        positions = positions[:, -1:] + 1
    rows: list[list[int]] = torch.cat(new, 1).tolist()
    return rows


if __name__ == "__main__":
    main()
