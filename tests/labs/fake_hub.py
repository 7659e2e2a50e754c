"""A small hub on loopback, for the real client of the hub: repositories, regular files, and large ones by LFS."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from served_here import in_thread

TOKEN = "hf_right"


@dataclass
class FakeHub:
    """What was uploaded.

    Attributes:
        visibility: `private` or `public` by repository.
        files: Committed files by repository and path.
        by_lfs: Paths of those that came by LFS.
        failing: Part of the path of requests that are answered by an error.
    """

    url: str = ""
    visibility: dict[str, str] = field(default_factory=dict)
    files: dict[tuple[str, str], bytes] = field(default_factory=dict)
    by_lfs: set[str] = field(default_factory=set)
    failing: str | None = None
    _objects: dict[str, bytes] = field(default_factory=dict)

    def make_app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def refuse(request: Request, go_on: Any) -> Any:
            signed = request.url.path.startswith("/objects/")  # as on the hub, their URLs need no token
            if not signed and request.headers.get("authorization") != f"Bearer {TOKEN}":
                return JSONResponse({"error": "Invalid username or password."}, 401)
            if self.failing is not None and self.failing in request.url.path:
                return JSONResponse({"error": "You have\nno rights for that. " * 99}, 403)
            return await go_on(request)

        app.post("/api/repos/create")(self._create)
        app.post("/api/validate-yaml")(lambda: {"errors": [], "warnings": []})
        app.post("/api/models/{owner}/{name}/preupload/{revision}")(self._modes)
        app.post("/{owner}/{name}.git/info/lfs/objects/batch")(self._batch)
        app.put("/objects/{oid}")(self._put)
        app.post("/verify")(self._verify)
        app.post("/api/models/{owner}/{name}/commit/{revision}")(self._commit)
        return app

    async def _create(self, request: Request) -> Any:
        asked = await request.json()
        repository = f"{asked['organization']}/{asked['name']}"
        if repository in self.visibility:
            return JSONResponse({"error": "You already created this model repo"}, 409)
        self.visibility[repository] = asked["visibility"]
        return {"url": f"{self.url}/{repository}", "name": repository}

    async def _modes(self, request: Request) -> Any:
        files = (await request.json())["files"]
        modes = {file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular" for file in files}
        return {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]}

    async def _batch(self, request: Request) -> Any:
        objects = (await request.json())["objects"]
        verify = {"href": f"{self.url}/verify"}
        return {
            "transfer": "basic",
            "objects": [
                each | {"actions": {"upload": {"href": f"{self.url}/objects/{each['oid']}"}, "verify": verify}}
                for each in objects
            ],
        }

    async def _put(self, oid: str, request: Request) -> Any:
        self._objects[oid] = await request.body()
        return {}

    async def _verify(self, request: Request) -> Any:
        asked = await request.json()
        content = self._objects[asked["oid"]]
        right = (hashlib.sha256(content).hexdigest(), len(content)) == (asked["oid"], asked["size"])
        return JSONResponse({}, 200 if right else 422)

    async def _commit(self, owner: str, name: str, request: Request) -> Any:
        for line in (await request.body()).splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                self.files[f"{owner}/{name}", value["path"]] = base64.b64decode(value["content"])
            if item["key"] == "lfsFile":
                self.files[f"{owner}/{name}", value["path"]] = self._objects[value["oid"]]
                self.by_lfs.add(value["path"])
        return {"commitUrl": f"{self.url}/{owner}/{name}/commit/1", "commitOid": "1"}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub that listens."""
    hub = FakeHub()
    with in_thread(hub.make_app()) as (port, _):
        hub.url = f"http://127.0.0.1:{port}"
        yield hub
