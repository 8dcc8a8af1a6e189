"""A stand-in for the Hub on this machine's loopback: just enough of its HTTP API to push a model and load it again."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class HubDouble(ThreadingHTTPServer):
    """Keeps the repositories that are pushed to it in memory, one commit each.

    `repositories` maps "user/name" to its files, bytes by path. Use it as a context manager; `url` is for HF_ENDPOINT.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = {}
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        repositories, path = self.server.repositories, self.path.split("?")[0]
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'user'}/{asked['name']}"
            known = name in repositories
            repositories.setdefault(name, {})
            self._json({"url": f"{self.server.url}/{name}", "name": name}, status=409 if known else 200)
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/main", path):
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            self._json({"files": [{**file, "shouldIgnore": False} for file in files]})
        elif commit := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            for line in filter(None, body.split(b"\n")):
                record = json.loads(line)
                if record["key"] == "file":
                    content = base64.b64decode(record["value"]["content"])
                    repositories[commit[1]][record["value"]["path"]] = content
            sha = self._sha(commit[1])
            self._json({"commitUrl": f"{self.server.url}/{commit[1]}/commit/{sha}", "commitOid": sha, "success": True})
        else:
            self._json({"error": f"no such call: {self.path}"}, status=404)

    def do_GET(self):
        repositories, path = self.server.repositories, self.path.split("?")[0]
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path)
        tree = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+.*", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        if path == "/api/whoami-v2":
            self._json({"name": "user", "type": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}})
        elif info and info[1] in repositories:
            siblings = [{"rfilename": name} for name in repositories[info[1]]]
            self._json({"id": info[1], "modelId": info[1], "sha": self._sha(info[1]), "siblings": siblings, "tags": []})
        elif tree and tree[1] in repositories:
            entries = repositories[tree[1]].items()
            self._json([{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in entries])
        elif file and file[2] in repositories.get(file[1], {}):
            data = repositories[file[1]][file[2]]
            etag = hashlib.sha256(data).hexdigest()
            self._send(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": self._sha(file[1]), "Accept-Ranges": "bytes"})
        else:
            code = "EntryNotFound" if file and file[1] in repositories else "RepoNotFound"
            commit = {"X-Repo-Commit": self._sha(file[1])} if code == "EntryNotFound" else {}
            self._send(404, b"{}", {"X-Error-Code": code, **commit})

    do_HEAD = do_GET

    def _sha(self, name):
        digest = hashlib.sha1()
        for path, data in sorted(self.server.repositories[name].items()):
            digest.update(path.encode() + data)
        return digest.hexdigest()

    def _json(self, answer, status=200):
        self._send(status, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _send(self, status, data, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
