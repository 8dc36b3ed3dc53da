"""An environment for verifiers: a number is guessed in several turns."""


def load_environment(turns: int = 3, slow: bool = False, breaks: bool = False,
                     silent: bool = False, greets: bool = False, blocks: float = 0.0):
    import asyncio
    import time

    import verifiers as vf
    from datasets import Dataset

    class Guess(vf.MultiTurnEnv):
        async def setup_state(self, state):
            state["guesses"] = []
            if greets:
                state["prompt"] = [*state["prompt"], {"role": "user", "content": "Hello!"}]

        async def env_response(self, messages, state, **options):
            if slow:
                await asyncio.sleep(60)
            time.sleep(blocks)
            if breaks:
                raise ZeroDivisionError("out of order")
            said = messages[-1].content
            state["guesses"].append(said)
            if said == state["answer"]:
                state["final_env_response"] = [{"role": "user", "content": "yes"}]
                return []
            if silent:
                return []
            return [{"role": "user", "content": "more" if said < state["answer"] else "less"}]

    async def early(state):
        guesses = state["guesses"]
        return 1 / len(guesses) if guesses and guesses[-1] == state["answer"] else 0.0

    def turns_taken(state):
        return -0.1 * len(state["trajectory"])

    def rows(*answers):
        return Dataset.from_list([{"question": f"{i}?", "answer": one}
                                  for i, one in enumerate(answers)])

    return Guess(dataset=rows(*"3579"), eval_dataset=rows(*"46"), max_turns=turns,
                 rubric=vf.Rubric(funcs=[early, turns_taken], weights=[1.0, 1.0]))
