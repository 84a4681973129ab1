"""The training loop: AdamW, a schedule over the time budget, and a loss curve."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from rolaq.testbed.batches import Batches
from rolaq.testbed.model import TrainingForward

WARM_UP = 0.02
LOG_EVERY = 50


@dataclass(frozen=True)
class Plan:
    """What a run may spend: `minutes` of training, or a number of `steps` when given."""

    minutes: float
    steps: int | None
    learning_rate: float
    answer_weight: float
    prompt_weight: float
    weight_decay: float = 0.1

    def progress(self, step: int, seconds: float) -> float:
        """Spent share of the budget, 0 to 1."""
        spent = step / self.steps if self.steps else seconds / (60 * self.minutes)
        return min(spent, 1.0)

    def rate(self, progress: float) -> float:
        """Learning rate: linear warm-up over the first 2 %, then linear to zero."""
        return self.learning_rate * min(progress / WARM_UP, 1.0, (1 - progress) / (1 - WARM_UP))


@dataclass
class History:
    """Progress of a run; a point is (step, seconds, text loss, answer loss)."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    points: list[tuple[int, float, float, float]] = field(default_factory=list)


def make_optimizer(model: torch.nn.Module, plan: Plan, device: str) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": plan.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95), fused=device == "cuda")


def compiled(forward: TrainingForward, batches: Batches, device: str) -> Callable:
    """The forward pass compiled and tried out on CUDA, or as it is where that fails."""
    if device != "cuda":
        return forward
    candidate = torch.compile(forward)
    try:
        torch.stack(losses(candidate, batches, device)).sum().backward()
    except Exception as error:
        warnings.warn(f"torch.compile failed, training goes on without it: {error}", stacklevel=2)
        candidate = forward
    forward.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    return candidate


def losses(forward: Callable, batches: Batches, device: str) -> tuple[torch.Tensor, ...]:
    """Text, answer and prompt losses of the next batch; BF16 matrix products on CUDA."""
    ids, answers = batches.next()
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        return forward(ids, answers)


def train(forward: TrainingForward, batches: Batches, plan: Plan, device: str) -> History:
    """Train until the budget is spent or interrupted; the clock starts after compiling."""
    optimizer = make_optimizer(forward.model, plan, device)
    run = compiled(forward, batches, device)
    history = History()
    start = time.perf_counter()
    try:
        while (progress := plan.progress(history.step, history.seconds)) < 1:
            for group in optimizer.param_groups:
                group["lr"] = plan.rate(progress)
            text, answer, prompt = losses(run, batches, device)
            (text + plan.answer_weight * answer + plan.prompt_weight * prompt).backward()
            torch.nn.utils.clip_grad_norm_(forward.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            history.step += 1
            history.tokens += batches.length * (batches.text_rows + batches.prompt_rows)
            if history.step % LOG_EVERY == 0 or history.step == plan.steps:
                _log(history, text.item(), answer.item(), plan)
            history.seconds = time.perf_counter() - start
    except KeyboardInterrupt:
        history.interrupted = True
    return history


def _log(history: History, text: float, answer: float, plan: Plan) -> None:
    point = (history.step, round(history.seconds, 1), round(text, 4), round(answer, 4))
    history.points.append(point)
    speed = history.tokens / max(history.seconds, 1e-9)
    left = plan.minutes * 60 - history.seconds
    if plan.steps:
        left = (plan.steps / history.step - 1) * history.seconds
    print(
        f"step {history.step:5d}  text {text:.3f}  answers {answer:.3f}"
        f"  {speed / 1e3:,.0f}K tokens/s  {max(left, 0):.0f} s left",
        flush=True,
    )
