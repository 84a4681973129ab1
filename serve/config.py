"""Configuration of `python -m rolaq.serve` and of the planner."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from rolaq.common.config import Config, ModelConfig
from rolaq.common.errors import RolaqError
from rolaq.common.files import find
from rolaq.quant.artifact import CONFIG_NAME
from rolaq.quant.protection import Protection
from rolaq.serve.settings import Settings

KEY_VARIABLE = "ROLAQ_API_KEY"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # addresses to listen on, and where they are reached from here


def _words(value: object) -> object:
    """YAML reads `[--port, 1]` as text and numbers; a command line is text alone."""
    return [str(item) for item in value] if isinstance(value, list) else value


class ServerConfig(Config):
    """How SGLang is started; `conf/server/default.yaml` says what each is."""

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=30000, ge=1, le=65535)
    api_key_file: str | None = None
    tp: int = Field(default=1, ge=1)
    dp: int = Field(default=1, ge=1)
    slots: int = Field(default=256, ge=1)
    sink_entries: int = Field(default=1024, ge=1)
    page_size: int = Field(default=64, ge=64, multiple_of=64)
    memory_fraction: float | None = Field(default=None, gt=0, lt=1)
    context: int | None = Field(default=None, gt=0)
    chunked_prefill: int | None = Field(default=None, gt=0)
    prefix_cache: bool = True
    metrics: bool = True
    startup_timeout: float = Field(default=1800, gt=0)
    stop_timeout: float = Field(default=60, ge=0)
    args: Annotated[list[str], BeforeValidator(_words)] = []

    @property
    def url(self) -> str:
        """Where the server is reached from this machine."""
        host = ANY.get(self.host, self.host)
        scheme = "https" if any(item.startswith("--ssl-certfile") for item in self.args) else "http"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

    def api_key(self) -> str | None:
        """The key that clients must send, from the file or the environment; None where neither is set.

        Raises:
            RolaqError: the file cannot be read or is empty.
        """
        if self.api_key_file is None:
            return os.environ.get(KEY_VARIABLE) or None
        try:
            key = Path(find(self.api_key_file)).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise RolaqError(f"server.api_key_file={self.api_key_file} cannot be read ({error})") from error
        if not key:
            raise RolaqError(f"server.api_key_file={self.api_key_file} is empty: write the key into it")
        return key


class ServeConfig(Config):
    """`conf/serve.yaml`."""

    model: ModelConfig
    server: ServerConfig
    artifact: str = "auto"
    artifacts: str = "artifacts"
    budget: str = "4+16"

    def artifact_folder(self) -> Path:
        """The folder of the RoLaQ artifact to serve.

        Raises:
            RolaqError: there is none; says where it was looked for.
        """
        given = Path(find(self.artifact))
        places = [given, given / "rolaq"]
        if self.artifact == "auto":
            places = [Path(self.artifacts) / self.model.name / "rolaq"]
            places += [Path(find(self.model.artifact)) / "rolaq"] if self.model.artifact else []
        for place in places:
            if (place / CONFIG_NAME).is_file():
                return place.resolve()
        raise RolaqError(
            f"no artifact for {self.model.name} in {', '.join(map(str, places))}: run "
            f"`make calibrate MODEL={self.model.name}` first, or give artifact=<folder>"
        )

    def settings(self, artifact: Path) -> Settings:
        """What SGLang's processes are told. Raises `RolaqError` for a budget that cannot be served."""
        return pool_settings(str(artifact), self.budget, self.server)


class PlanConfig(Config):
    """`conf/plan.yaml`."""

    model: ModelConfig
    server: ServerConfig
    gpu_gb: float = Field(gt=0)
    budget: str = "4+16"
    feedback: bool = False
    tokens: int = Field(default=32768, gt=0)
    output: str | None = None


def pool_settings(artifact: str, budget: str, server: ServerConfig) -> Settings:
    """The packed pool's settings from a budget `sink+recent` and the server's.

    Raises:
        RolaqError: more protected tokens than the decode kernel reads.
    """
    protection = Protection.parse(budget)
    return Settings.checked(
        artifact=artifact,
        sink=protection.sink,
        recent=protection.recent,
        sink_entries=server.sink_entries,
        slots=server.slots,
        page_size=server.page_size,
    )
