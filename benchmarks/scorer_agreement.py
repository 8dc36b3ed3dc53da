"""Verdicts of the scorers of GSM8K and IFEval beside those of lm-eval and math-verify.

    python benchmarks/scorer_agreement.py --data data --lm-eval-python lm-eval/bin/python \\
        --out benchmarks/results/scorer_agreement_cpu.json

``--data`` has ``gsm8k/train.jsonl``, ``gsm8k/test.jsonl`` and ``ifeval/input_data.jsonl``, as they
are published. The other Python has ``lm-eval[ifeval]`` and nltk's ``punkt_tab``, which nltk looks
for in ``$NLTK_DATA`` and else downloads; this one has math-verify. Responses are made from the data
by a fixed seed: each gold answer in 14 forms; for each row of IFEval, texts that follow some of
its instructions, with and without noise. math-verify judges every twentieth row; it is slow.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from machine import Recording

FORMS = {
    "bare": "{solution}", "mark": "so\n#### {gold}", "sentence": "The answer is {gold}.",
    "dollar": "It costs ${gold}.", "units": "So there are {gold} apples.",
    "decimal": "It is {gold}.00", "wrong": "The answer is {gold}1.",
    "boxed": "Thus $\\boxed{{{gold}}}$.", "latex comma": "Thus $\\boxed{{{latex}}}$",
    "percent": "That is {gold}%.", "negative": "It is -{gold}", "other": None, "cut": None,
    "fraction": "It is {double}/2."}
SENTENCES = (
    "The house stands by the river and the children play there.",
    "My friend wrote a long letter about the weather.",
    "Every morning we walk to the old market.", "It was good to see you, Mr. Smith.",
    "She said it costs 3.50 dollars.")
IN_LANGUAGE = {
    "hi": "यह एक छोटा सा वाक्य है जो हिंदी में लिखा गया है।", "kn": "ಇದು ಕನ್ನಡದಲ್ಲಿ ಬರೆದ ಒಂದು ವಾಕ್ಯ.",
    "mr": "हे मराठीत लिहिलेले एक वाक्य आहे आणि ते छान आहे.",
    "vi": "Đây là một câu được viết bằng tiếng Việt.", "ko": "이것은 한국어로 쓴 문장입니다.",
    "sw": "Hii ni sentensi iliyoandikwa kwa Kiswahili kwa ajili ya watu wote.",
    "de": "Das ist ein Satz, der auf Deutsch geschrieben ist.", "pa": "ਇਹ ਪੰਜਾਬੀ ਵਿੱਚ ਲਿਖਿਆ ਵਾਕ ਹੈ।",
    "fa": "این یک جمله است که به فارسی نوشته شده است.",
    "ru": "Это предложение написано на русском языке.",
    "bg": "Това изречение е написано на български език.",
    "pt": "Esta é uma frase escrita em português do Brasil, não em espanhol.",
    "gu": "આ ગુજરાતીમાં લખાયેલું વાક્ય છે.", "te": "ఇది తెలుగులో రాసిన వాక్యం.",
    "it": "Questa è una frase scritta in italiano.", "ar": "هذه جملة مكتوبة باللغة العربية.",
    "ta": "இது தமிழில் எழுதப்பட்ட வாக்கியம்.", "fi": "Tämä on suomeksi kirjoitettu lause.",
    "ur": "یہ اردو میں لکھا ہوا ایک جملہ ہے۔", "th": "นี่คือประโยคภาษาไทย",
    "ne": "यो नेपाली भाषामा लेखिएको वाक्य हो।", "bn": "এটি বাংলায় লেখা একটি বাক্য।"}
ODD = ("", "   ", "123", "CEO's DON'T U.S. A--B NASA, \"WHAT\" (HELLO) 'TIS I'M A.B. X/Y 3D")
ENDS = ("*", " *", "\n*", "\n* a", "\n- b\n", "[", "<<", "******", "***", '"', "P.S. x", "!?",
        "\n \n")


# -- responses ------------------------------------------------------------------------------------


def to_gsm8k(rows: list[dict], rng: random.Random) -> Iterator[tuple[dict, dict[str, str]]]:
    """Each row and a response in each form."""
    for row in rows:
        solution = row["answer"]
        gold = solution.rpartition("####")[2].strip()
        texts = {}
        for name, form in FORMS.items():
            if name == "other":
                texts[name] = rng.choice(rows)["answer"]
            elif name == "cut":
                texts[name] = solution[:rng.randrange(1, len(solution))]
            else:
                texts[name] = form.format(solution=solution, gold=gold,
                                          latex=gold.replace(",", "{,}"),
                                          double=2 * int(float(gold.replace(",", ""))))
        yield row, texts


def following(name: str, k: dict, text: str, rng: random.Random) -> str:
    """The text, changed so that it follows an instruction."""

    def count(key: str, relation: str = "relation") -> int:
        return k[key] - (k[relation] != "at least")

    def some(number: int) -> list[str]:
        return [rng.choice(SENTENCES) for _ in range(number)]

    match name.partition(":")[2]:
        case "existence":
            return text + "\n" + " ".join(k["keywords"])
        case "frequency":
            return text + "\n" + " ".join([k["keyword"]] * count("frequency"))
        case "letter_frequency":
            least = k["let_relation"] == "at least"
            return text + "\n" + k["letter"] * (k["let_frequency"] if least else 0)
        case "response_language":
            return IN_LANGUAGE[k["language"]]
        case "number_sentences":
            return " ".join(some(count("num_sentences"))) or "word"
        case "number_paragraphs":
            return "\n***\n".join(some(k["num_paragraphs"]))
        case "number_words":
            return " ".join(["word"] * count("num_words"))
        case "nth_paragraph_first_word":
            parts = some(k["num_paragraphs"])
            parts[k["nth_paragraph"] - 1] = f"{k['first_word']}, {parts[0]}"
            return "\n\n".join(parts)
        case "number_placeholders":
            return text + " " + " ".join(f"[a{n}]" for n in range(k["num_placeholders"]))
        case "postscript":
            return f"{text}\n{k['postscript_marker']} bye"
        case "number_bullet_lists":
            return text + "\n" + "\n".join(f"* point {n}" for n in range(k["num_bullets"]))
        case "constrained_response":
            return "My answer is maybe."
        case "number_highlighted_sections":
            return text + " " + " ".join(f"*part {n}*" for n in range(k["num_highlights"]))
        case "multiple_sections":
            return "\n".join(f"{k['section_spliter']} {n + 1}\ntext"
                             for n in range(k["num_sections"]))
        case "json_format":
            return json.dumps({"a": text})
        case "title":
            return "<<The title>>\n" + text
        case "two_responses":
            return "One answer.\n******\nAnother answer."
        case "repeat_prompt":
            return k["prompt_to_repeat"] + "\n" + text
        case "end_checker":
            return text + " " + k["end_phrase"]
        case "capital_word_frequency":
            return text + " " + " ".join(["WORD"] * count("capital_frequency", "capital_relation"))
        case "english_capital":
            return text.upper()
        case "english_lowercase":
            return text.lower()
        case "no_comma":
            return text.replace(",", " ")
        case "quotation":
            return f'"{text}"'
        case "forbidden_words":
            return text
    raise ValueError(f"there is no text for the instruction {name!r}")


def noisy(text: str, rng: random.Random) -> str:
    """What a model may do to a text that follows instructions."""
    lines = text.split("\n")
    rng.shuffle(lines)
    return rng.choice((
        "Sure, here it is:\n" + text, text + "\nI hope that helps!", f"*{text}*",
        text.replace(" ", " \n", 3), text.replace("\n", "\n\n"), "\n".join(lines),
        text + rng.choice(ENDS), text[:rng.randrange(1, len(text) + 1)] if text else text))


def to_ifeval(row: dict, prompts: list[str], solutions: list[str], number: int,
              rng: random.Random) -> list[str]:
    """So many responses to a row, and the odd ones."""
    instructions, found = list(zip(row["instruction_id_list"], row["kwargs"], strict=True)), []
    for turn in range(number):
        text = rng.choice((
            rng.choice(SENTENCES), " ".join(rng.sample(SENTENCES, 3)), rng.choice(solutions),
            rng.choice(prompts), f"{rng.choice(prompts)}\n\n{rng.choice(solutions)}"))
        # A third follows all of them, half stays without noise.
        several = len(instructions) if turn % 3 == 0 else rng.randrange(len(instructions) + 1)
        for name, arguments in rng.sample(instructions, several):
            text = following(name, arguments, text, rng)
        for _ in range(rng.randrange(3) if turn % 2 else 0):
            text = noisy(text, rng)
        found.append(text)
    return [*found, *ODD, row["prompt"]]


# -- verdicts -------------------------------------------------------------------------------------


def judge(folder: Path) -> None:
    """Verdicts of lm-eval, in its own Python: a line for each line of ``asked.jsonl``."""
    import langdetect
    import lm_eval
    import yaml
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter
    from lm_eval.tasks.ifeval import utils
    from nltk.tokenize import PunktTokenizer

    langdetect.DetectorFactory.seed = 0
    random.seed(0)  # which draws a letter where an instruction's is none
    task = yaml.safe_load(Path(lm_eval.__file__).with_name("tasks").joinpath(
        "gsm8k", "gsm8k.yaml").read_text())
    filters = [RegexFilter(**{key: value for key, value in one["filter"][0].items()
                              if key != "function"}) for one in task["filter_list"]]
    metric = {key: task["metric_list"][0][key]
              for key in ("ignore_case", "ignore_punctuation", "regexes_to_ignore")}
    punkt = PunktTokenizer("english")

    def of_gsm8k(row: dict, text: str) -> list[bool]:
        return [bool(exact_match_hf_evaluate(one.apply([[text]], [row])[0], [row["answer"]],
                                             **metric)["exact_match"]) for one in filters]

    def of_ifeval(row: dict, text: str) -> list[list[bool]]:
        example = utils.InputExample(**{key: row[key] for key in (
            "key", "instruction_id_list", "prompt", "kwargs")})
        return [rule(example, text).follow_instruction_list for rule in (
            utils.test_instruction_following_strict, utils.test_instruction_following_loose)]

    of = {"gsm8k": of_gsm8k, "ifeval": of_ifeval,
          "sentences": lambda row, text: len(punkt.tokenize(text))}
    with (folder / "asked.jsonl").open() as asked, (folder / "said.jsonl").open("w") as said:
        for line in asked:
            one = json.loads(line)
            said.write(json.dumps([of[one["what"]](one["row"], text)
                                   for text in one["texts"]]) + "\n")


def lm_eval_says(asked: list[dict], python: str) -> list[list]:
    """The verdicts of another Python's lm-eval."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "asked.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
        subprocess.run([python, __file__, "--judge", folder], check=True, cwd=folder,
                       stdout=subprocess.DEVNULL, timeout=1800)
        return [json.loads(line) for line in Path(folder, "said.jsonl").open()]


def shares(agree: Counter, total: Counter) -> dict:
    """Of each key and of all: verdicts that are the same, and verdicts."""
    return {"all": [sum(agree.values()), sum(total.values())],
            **{key: [agree[key], total[key]] for key in sorted(total)}}


def gsm8k_agreement(rows: list[dict], python: str) -> dict:
    from math_verify import parse, verify

    from grpo.envs.tasks.gsm8k import is_correct

    made = list(to_gsm8k(rows, random.Random(0)))
    said = lm_eval_says([{"what": "gsm8k", "row": row, "texts": list(texts.values())}
                         for row, texts in made], python)
    agree, total = ({judge: Counter() for judge in ("strict", "flexible", "math-verify")}
                    for _ in range(2))
    for number, ((row, texts), verdicts) in enumerate(zip(made, said, strict=True)):
        gold = row["answer"].rpartition("####")[2].strip().replace(",", "")
        for (form, text), (strict, flexible) in zip(texts.items(), verdicts, strict=True):
            ours, theirs = is_correct(row, text), {"flexible": flexible}
            if "####" in text:
                theirs["strict"] = strict
            if number % 20 == 0:
                theirs["math-verify"] = bool(verify(parse(gold), parse(text)))
            for judge_name, verdict in theirs.items():
                total[judge_name][form] += 1
                agree[judge_name][form] += ours == verdict
    return {name: shares(agree[name], total[name]) for name in total}


def ifeval_agreement(rows: list[dict], solutions: list[str], number: int, python: str) -> dict:
    from grpo.envs.tasks.ifeval import score

    rng, prompts = random.Random(1), [row["prompt"] for row in rows]
    asked = [{"what": "ifeval", "row": row,
              "texts": to_ifeval(row, prompts, solutions, number, rng)} for row in rows]
    agree, total, fulfilled = Counter(), Counter(), 0
    for one, verdicts in zip(asked, lm_eval_says(asked, python), strict=True):
        for text, theirs in zip(one["texts"], verdicts, strict=True):
            ours = score(one["row"], text)
            for rule, said in zip(("inst_strict", "inst_loose"), theirs, strict=True):
                for name, k, mine, other in zip(
                        one["row"]["instruction_id_list"], one["row"]["kwargs"], ours[rule], said,
                        strict=True):
                    if not (k.get("letter") or "a").isalpha():
                        name += ", of no letter"
                    total[name] += 1
                    agree[name] += mine == other
                    fulfilled += other
    return {"responses_per_row": len(asked[0]["texts"]), "fulfilled": fulfilled,
            **shares(agree, total)}


def sentence_agreement(texts: list[str], python: str) -> dict:
    from grpo.envs.tasks.language import sentences

    (theirs,) = lm_eval_says([{"what": "sentences", "row": {}, "texts": texts}], python)
    apart = [abs(sum(1 for _ in sentences(text)) - count)
             for text, count in zip(texts, theirs, strict=True)]
    return {"all": [apart.count(0), len(apart)], "most_apart": max(apart)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="with gsm8k/ and ifeval/")
    parser.add_argument("--lm-eval-python", required=True, help="a Python that has lm-eval")
    parser.add_argument("--responses", type=int, default=60, help="to a row of IFEval, and 5 odd")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    python = str(Path(args.lm_eval_python).absolute())

    def lines(*path: str) -> list[dict]:
        return [json.loads(line) for line in args.data.joinpath(*path).open()]

    versions = subprocess.run(
        [python, "-c", "from importlib.metadata import version as of; "
         "print(of('lm-eval'), of('nltk'), of('langdetect'))"],
        capture_output=True, text=True, check=True).stdout.split()
    test, ifeval = lines("gsm8k", "test.jsonl"), lines("ifeval", "input_data.jsonl")
    solutions, prompts = [row["answer"] for row in test], [row["prompt"] for row in ifeval]
    recording = Recording("scorer_agreement", args.out, lm_eval_versions=dict(
        zip(("lm-eval", "nltk", "langdetect"), versions, strict=True)))
    recording.describe_machine(also=("math-verify", "langdetect", "nltk"))
    rng = random.Random(0)
    mixed = ["\n".join(rng.sample(prompts, 4)) for _ in range(300)]
    recording.add(sentences=sentence_agreement(
        [*prompts, *(row["question"] for row in test), *solutions, *mixed], python))
    recording.add(gsm8k=gsm8k_agreement([*test, *lines("gsm8k", "train.jsonl")], python))
    recording.add(ifeval=ifeval_agreement(ifeval, solutions, args.responses, python))
    recording.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--judge"]:
        judge(Path(sys.argv[2]))
    else:
        main()
