"""Names that files of facts use for the same fields, in one table.

A name is compared without case, punctuation and a number at its end (`Target-New`, `targetNew` and `target_new2` are
one), in the singular and the plural, and together with the name of the object that it stands in:
`{"target": {"new": …}}` is `target_new`, and the `object` of `original` is `original_object`. So a table of flat names
reads nested records, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Roles of a record's fields, with their names; if a record has two names of a role, the earlier one is read. `answer`
# is the new object if a record names no other, and else the old one, if it differs: "answers" of zsRE. "… answers" are
# the answers to prompts of another field.
NAMES = {
    "subject": "subject concept entity subj subject_name subject_label sub_label head ent",
    "prompt": "prompt prompts src question questions query text template edit_prompt input_prompt statement sentence "
    "cloze instruction input q source_text update masked_sentence prompt_template edit_question",
    "target": "target target_new target_new_object alt target_false new_object object_new new_answer answer_new "
    "new_target edited_answer edit_answer edit_target counterfactual new_fact_object target_object_new "
    "answer_counterfactual counterfactual_answer counterfactual_object counterfact_object new targets "
    "edited_object new_value chosen",
    "previous": "previous target_true ground_truth old target_old old_target old_object object_old old_answer "
    "answer_old original_object original_answer original_target object_true true_object true_answer true_target "
    "answer_true target_original target_previous attribute before before_answer before_object old_value rejected",
    "answer": "answer answers ans object obj obj_label label labels output completion response tail gold ideal "
    "expected_answer expected_output expected correct_answer best_answer a pred",
    "target_aliases": "target_aliases target_alias new_answer_alias new_answer_aliases",
    "relation": "relation_id relation predicate rel",
    "case_id": "case_id known_id",
    "occurrence": "occurrence",
    "paraphrases": "paraphrases paraphrase paraphrase_prompt paraphrase_prompts paraphrased_question "
    "paraphrase_question rephrase rephrases rephrased rephrase_prompt rephrase_prompts rephrase_question "
    "rephrased_prompt rephrased_question filtered_rephrases para_question para_questions para p_paraphrase queries "
    "rewordings personas portability_personas generality generalization generalization_prompts test_prompt "
    "ood_rephrase light_rephrase_prompts strong_rephrase_prompts",
    "neighbors": "neighbors neighbor neighbours neighborhood_prompts neighborhood_prompt neighborhood "
    "neighbor_prompts l_neighbor",
    "neighbors answers": "neighborhood_answers neighborhood_ground_truth neighbor_answers",
    "same_subject": "same_subject l_relation relation_specificity relation_specifity",
    "portability": "portability portability_prompt portability_prompts portability_question portability_inputs "
    "portability_hop port p_subject_alias p_reasoning new_question sub_question sub_questions 2hop_question "
    "two_hop_question 2_hop_question question_2hop one_hop multi_hop multihop mhop logical_generalization "
    "subject_aliasing reasoning compositionality_i compositionality_ii",
    "portability answers": "portability_answer portability_answers portability_ground_truth portability_target "
    "portability_hop_ans port_ans port_answer sub_answer sub_answers 2hop_answer two_hop_answer answer_2hop "
    "multi_hop_answer mhop_ans",
    "locality": "locality loc locality_prompt locality_prompts locality_question locality_questions loc_question "
    "locality_inputs nq_question unrelated unrelated_prompt unrelated_question",
    "locality answers": "loc_ans loc_answer locality_ground_truth locality_answer locality_answers locality_target "
    "unrelated_answer",
    "generation": "generation generation_prompts generation_prompt",
    "references": "references reference reference_texts",
    "keep": "keep",
    "also": "also",
    "cross_lingual": "cross_lingual",
}
# Roles of one text, and roles of several texts; the others have prompts with answers.
SCALARS = ("subject", "prompt", "target", "previous", "answer", "relation", "case_id", "occurrence")
TEXTS = ("target_aliases", "paraphrases", "generation", "references", "also")
# Fields of a fact, which `--map` maps to a record's fields.
FIELDS = tuple(role for role in NAMES if role != "answer" and " " not in role)
# Objects that are not read, whatever their fields are called: results of a tool, and repetitions of the fact.
CLOSED = frozenset({"pre", "post", "metrics", "scores", "results", "rewrite", "single_hops", "orig"})
# Names of the text in an object that stands for a text.
TEXT_NAMES = ("str", "text", "value", "label", "name", "answer")
RANKS = {name: (role, rank) for role, names in NAMES.items() for rank, name in enumerate(names.split())}


def normal(name: str) -> str:
    """Return a name as the table has it: `Target-New`, `targetNew` and `target_new2` are `target_new`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[\W_]+", "_", words.casefold()).strip("_").rstrip("0123456789").rstrip("_")


def role_of(path: Sequence[str]) -> tuple[str, int] | None:
    """Return the role of the last name of a path and its rank among the synonyms; None if it is not known."""
    *above, name = map(normal, path[-2:])
    if not above:
        return _rank(name)
    within = _rank(above[0]) if name in TEXT_NAMES else None  # a table's column `target_new.str`
    return RANKS.get(f"{above[0]}_{name}") or within or _rank(name)


def _rank(name: str) -> tuple[str, int] | None:
    """Return the role and rank of a name, of its plural, or of its singular if it is a word of some length."""
    return RANKS.get(name) or RANKS.get(f"{name}s") or (RANKS.get(name.removesuffix("s")) if len(name) > 4 else None)
