"""An environment for verifiers: what a tool has to be asked for."""


def population(city: str) -> int:
    """People of a city.

    Args:
        city: its name.
    """
    return {"A": 12, "B": 34}[city]


def load_environment():
    import verifiers as vf
    from datasets import Dataset

    def right(completion, answer):
        return float(completion[-1].content == answer)

    def asked(completion):
        return 0.25 * sum(len(message.tool_calls or ()) for message in completion
                          if message.role == "assistant")

    rows = [{"question": f"{city}?", "answer": answer}
            for city, answer in (("A", "12"), ("B", "34"))]
    return vf.ToolEnv(tools=[population], max_turns=3, dataset=Dataset.from_list(rows),
                      eval_dataset=Dataset.from_list(rows),
                      rubric=vf.Rubric(funcs=[right, asked], weights=[1.0, 1.0]))
