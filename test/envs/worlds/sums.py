"""An environment for verifiers: sums, one turn, a rubric of two functions."""


def right(completion, answer):
    return float(completion[-1].content.strip() == answer)


async def short(completion):
    return -len(completion[-1].content) / 10


def load_environment(highest: int = 9, broken: bool = False, grouped: bool = False):
    import verifiers as vf
    from datasets import Dataset

    def fails(completion):
        if "7" in completion[-1].content:
            raise LookupError("no seven")
        return 0.0

    def best(completions) -> list[float]:
        return [1.0] * len(completions)

    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)}
            for a in range(highest + 1) for b in range(highest + 1)]
    funcs = [right, short] + [fails] * broken + [best] * grouped
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(
        funcs=funcs, weights=[1.0, 0.5] + [1.0] * (broken + grouped)))
