"""The command's path: OSCAR fit, baseline, training, artifacts, report."""

from __future__ import annotations

import time
from collections.abc import Sequence

from omegaconf import DictConfig
from torch import Tensor

from rolaq.calib.checkpoint import RunState, check_identity, load_state
from rolaq.calib.config import CalibrateConfig
from rolaq.calib.loop import CalibrationLoop
from rolaq.calib.machine import prepare_machine
from rolaq.calib.oscar import fit_oscar
from rolaq.calib.outputs import finished, print_summary, write_oscar, write_results
from rolaq.calib.sensitivity import measure
from rolaq.calib.session import Session, open_session
from rolaq.calib.shaped import ShapedStudent, build_shaped, choose, make_basis
from rolaq.calib.student import Student
from rolaq.calib.trainer import Trainer
from rolaq.calib.validate import Validation
from rolaq.common.config import resolve
from rolaq.common.files import markdown_table
from rolaq.common.tracking import Tracker, tracker
from rolaq.quant.adapters.fused import fused_attention
from rolaq.quant.geometry import energies
from rolaq.quant.rotation import build_rotation


def main(cfg: DictConfig) -> None:
    """Run one calibration from a composed Hydra config."""
    settings = resolve(cfg, CalibrateConfig)
    prepare_machine(settings)
    session = open_session(settings)
    state = resume(session)
    if finished(session, state):
        print(
            f"nothing to do: {session.folder / session.method} was made by this very run; overwrite=true repeats it"
        )
    else:
        track = tracker(settings.tracking, "calibrate", settings.model_dump(mode="json"))
        with fused_attention(), track:
            calibrate(session, state, track)
    print_summary(session)


def resume(session: Session) -> RunState:
    """The state to go on from: the stored one of the same run, or a new one.

    Raises `RolaqError` when the folder holds another run and `overwrite` is not set.
    """
    path, identity = session.work / "state.pt", session.identity()
    stored = None if session.settings.overwrite else load_state(path)
    if stored is None:
        return RunState(identity)
    check_identity(stored.identity, identity, session.folder)
    if 0 < stored.step < session.config.steps:
        print(f"resuming after step {stored.step} of {session.config.steps}")
    return stored


def calibrate(session: Session, state: RunState, track: Tracker) -> None:
    """Everything between loading and the summary; writes both artifacts."""
    started = time.perf_counter() - 60 * state.minutes
    print(f"fitting OSCAR on {session.data.fit.numel()} tokens")
    base = fit_oscar(session.model, session.layers, session.data.fit, session.settings.quant.spec.group_size)
    base = base.to(session.device)
    oscar = write_oscar(session, base, track)
    validation = open_validation(session)
    if not state.reference:
        print("scoring OSCAR on validation text")
        state.reference = validation.kl(oscar)
    batches = [batch.to(session.device) for batch in session.data.batches]
    if session.settings.quant.feedback:
        student = build_shaped_student(session, base, batches, validation, state)
    else:
        student = build_student(session, base)
    trainer = Trainer(session.model, session.layers, student, session.head, session.config)
    path = session.work / "state.pt"
    best = CalibrationLoop(trainer, validation, batches, state, path, track, started).run()
    student.load_state_dict(best.student)
    errors = {m.name: validation.attention_errors(m, session.layers) for m in (oscar, student.method())}
    write_results(session, state, student.export(), errors, track)


def open_validation(session: Session) -> Validation:
    """The validation text with the teacher's states, computed once."""
    config, device = session.config, session.device
    documents = {length: ids.to(device) for length, ids in session.data.validation.items()}
    return Validation(
        session.model,
        session.head,
        documents,
        skip=config.skip,
        chunk=config.chunk,
        batch_tokens=config.validation.batch_tokens,
    )


def build_student(session: Session, base: Tensor) -> Student:
    """The learnable quantizer at its start: R0, T0 and the gain rule's first value."""
    quant = session.settings.quant
    rotation = build_rotation(quant.rotation, base, energies(session.layers).to(base.device))
    return Student(rotation, len(session.layers), quant).to(base.device)


def build_shaped_student(
    session: Session, base: Tensor, batches: Sequence[Tensor], validation: Validation, state: RunState
) -> Student:
    """The learnable quantizer with error feedback: measure the sensitivity, choose the basis on validation text."""
    quant = session.settings.quant
    assert quant.feedback is not None
    texts = batches[: quant.feedback.batches]
    print(
        f"measuring the sensitivity ({quant.feedback.sensitivity}) on {sum(t.numel() for t in texts)} tokens"
    )
    config = session.config
    found = measure(
        session.model, session.layers, session.head, texts, quant.feedback.sensitivity,
        skip=config.skip, chunk=config.chunk, seed=session.settings.seed,
    )  # fmt: skip
    geometry, feedback = energies(session.layers), quant.feedback

    def make(eps: float, power: float) -> ShapedStudent:
        return build_shaped(quant, make_basis(found, base, feedback, quant.spec, eps, power), geometry)

    shortest = config.used_lengths[0]
    student, tried = choose(make, feedback, lambda method: validation.kl(method, [shortest])[shortest])
    if not state.student:
        state.history += [{"kind": "basis", **row} for row in tried]
    print(markdown_table(tried, ["eps", "whitening", "kl"]))
    return student
