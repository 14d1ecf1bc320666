"""Stream answers from a jserve server over gRPC.

    jserve serve                          # in one terminal
    python examples/grpc_stream.py        # in another

The first part prints one answer as it is made. The second sends several questions over one call and prints
each answer when it is whole; a question that fails leaves the others alone.
"""

import sys

from jserve.client import Client, PromptRequest
from jserve.errors import JserveError
from jserve.request import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=64)
QUESTIONS = ["What is gravity?", "Name three colours.", "Why is the sky blue?"]


def stream_one(client: Client, question: str) -> None:
    for delta in client.generate([{"role": "user", "content": question}], PARAMS):
        print(delta.text, end="", flush=True)
        if delta.usage is not None and delta.timings is not None:
            print(f"\n[{delta.usage.output_tokens} tokens, the first after {delta.timings.ttft:.3f} s]\n")


def stream_many(client: Client, questions: list[str]) -> None:
    requests = {
        question: PromptRequest(prompt=[{"role": "user", "content": question}], params=PARAMS) for question in questions
    }
    asked = {request.request_id: question for question, request in requests.items()}
    answers = dict.fromkeys(asked, "")
    for delta in client.generate_stream(requests.values()):
        answers[delta.request_id] += delta.text
        if delta.finish_reason is not None:
            print(f"{asked[delta.request_id]}\n  {delta.error or answers[delta.request_id]}\n")


def main() -> int:
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7470"
    try:
        with Client(address) as client:
            stream_one(client, "What is gravity? Answer in one sentence.")
            stream_many(client, QUESTIONS)
    except JserveError as error:
        print(f"error {error.code}: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
