//! The real binary on data folders of its own, and a plain HTTP/1.1 client to talk to its node.

use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Name of the model in a ready folder.
pub const MODEL: &str = "tiny";

/// A data folder that is removed after the test.
pub struct Folder {
    dir: TempDir,
}

/// The output of a command and its exit code.
#[derive(Debug)]
pub struct Finished {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Folder {
    /// A folder without a ledger and without a model.
    pub fn empty() -> Self {
        Self { dir: TempDir::new().unwrap() }
    }

    /// A folder with a ledger and no model.
    pub fn initialised() -> Self {
        let folder = Self::empty();
        folder.json(&["init"]);
        folder
    }

    /// A folder with a ledger and a small qualified model: a copy of one that is made once per run.
    pub fn ready() -> Self {
        static TEMPLATE: OnceLock<Folder> = OnceLock::new();
        TEMPLATE.get_or_init(Self::make_ready).duplicate()
    }

    fn make_ready() -> Self {
        let folder = Self::initialised();
        let model = folder.path().join("tiny.gguf");
        cresset_models::testing::tiny_llama_gguf(&model, 7).unwrap();
        folder.json(&["models", "add", "--path", model.to_str().unwrap(), "--name", MODEL]);
        folder.qualify(MODEL);
        folder
    }

    /// Qualifies a model that has no reference outputs, and accepts it. Returns what the second
    /// command said.
    pub fn qualify(&self, model: &str) -> Value {
        assert_eq!(self.json(&["qualify", model])["grade"], "self");
        self.json(&["models", "accept", model, "--reason", "it is a test's"])
    }

    /// A new folder with the same content. No process may be running on this one.
    pub fn duplicate(&self) -> Self {
        let folder = Self::empty();
        copy(self.path(), folder.path());
        folder
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cresset"));
        command.arg("--data-dir").arg(self.path()).args(arguments);
        without_settings(&mut command);
        command.stdin(Stdio::null());
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Finished {
        Finished::of(self.command(arguments).output().unwrap())
    }

    /// A command with the given `FAILPOINTS`.
    pub fn run_failing(&self, points: &str, arguments: &[&str]) -> Finished {
        Finished::of(self.command(arguments).env("FAILPOINTS", points).output().unwrap())
    }

    /// Runs a command that must succeed, and returns its document.
    pub fn json(&self, arguments: &[&str]) -> Value {
        let finished = self.run(&[arguments, &["--json"]].concat());
        assert_eq!(finished.code, Some(0), "{arguments:?}: {finished:?}");
        finished.document()
    }

    /// Runs a command that must fail with `code`, and returns its error's message.
    pub fn fails(&self, arguments: &[&str], code: i32) -> String {
        let finished = self.run(&[arguments, &["--json"]].concat());
        assert_eq!(finished.code, Some(code), "{arguments:?}: {finished:?}");
        let document = finished.document();
        let message = document["error"]["message"]
            .as_str()
            .unwrap_or_else(|| panic!("{arguments:?}: {finished:?}"));
        format!("{message} {}", document["error"]["remedy"].as_str().unwrap_or_default())
    }

    /// An account with trial credits and a key for it.
    pub fn customer(&self, trial: u64) -> Customer {
        let account =
            self.json(&["accounts", "create", "--name", "acme", "--trial", &trial.to_string()]);
        let account = account["id"].as_str().unwrap().to_owned();
        let key = self.json(&["keys", "create", "--account", &account]);
        Customer {
            account,
            key: key["secret"].as_str().unwrap().to_owned(),
            key_id: key["id"].as_str().unwrap().to_owned(),
        }
    }

    /// A node on this folder, ready for requests.
    pub fn serve(&self) -> Served {
        self.serve_with(&[])
    }

    pub fn serve_with(&self, more: &[&str]) -> Served {
        Served::start(self.serve_command(more))
    }

    pub fn serve_command(&self, more: &[&str]) -> Command {
        let arguments = ["serve", "--json", "--listen", "127.0.0.1:0", "--operator", "127.0.0.1:0"];
        self.command(&[&arguments[..], more].concat())
    }

    /// What a node says of the models that it does not serve; it serves none.
    pub fn unserved(&self) -> String {
        Served::start(self.serve_command(&[])).unserved()
    }

    /// A node with the given `FAILPOINTS`.
    pub fn serve_failing(&self, points: &str) -> Served {
        let mut command = self.serve_command(&[]);
        command.env("FAILPOINTS", points);
        Served::start(command)
    }

    /// A node whose files may each grow to this size and not beyond.
    pub fn serve_within(&self, file_bytes: u64) -> Served {
        let node = self.serve_command(&[]);
        // The shell counts blocks of 512 bytes; a write beyond the limit is an error, not a signal.
        let limit = format!("trap '' XFSZ; ulimit -S -f {}; exec \"$@\"", file_bytes.div_ceil(512));
        let mut command = shell(&limit);
        command.arg("sh").arg(node.get_program()).args(node.get_args()).stdin(Stdio::null());
        Served::start(command)
    }
}

impl Served {
    /// Returns when the node is ready for requests.
    pub fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (log, reader) = drain(child.stderr.take().unwrap());
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let ready: Value = serde_json::from_str(&line).unwrap_or_else(|_| {
            panic!("no ready line but {line:?}; the log:\n{}", log.lock().unwrap())
        });
        assert_eq!(ready["event"], "ready");
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        Self {
            child,
            listen: text(&ready["listen"]),
            operator: text(&ready["operator"]),
            model: ready["models"][0]["id"].as_str().unwrap_or_default().to_owned(),
            log,
            reader: Some(reader),
        }
    }
}

pub struct Customer {
    pub account: String,
    pub key: String,
    pub key_id: String,
}

impl Finished {
    pub fn of(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Self {
            code: output.status.code(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }

    pub fn document(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// A running node. Killed when dropped.
pub struct Served {
    child: Child,
    pub listen: String,
    pub operator: String,
    /// Id of the only model; empty without one.
    pub model: String,
    log: std::sync::Arc<Mutex<String>>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Served {
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, name: &str) {
        let status = Command::new("kill")
            .args([&format!("-{name}"), &self.child.id().to_string()])
            .status()
            .unwrap();
        assert!(status.success());
    }

    /// Sends SIGTERM and returns the exit status.
    pub fn terminate(mut self) -> ExitStatus {
        self.signal("TERM");
        self.wait()
    }

    /// Sends SIGKILL: the process has no chance to tidy up.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for the process to end. Its log is then whole.
    pub fn wait(&mut self) -> ExitStatus {
        let status = self.child.wait().unwrap();
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
        status
    }

    /// Ends a node that serves no model, and returns its log.
    pub fn unserved(mut self) -> String {
        assert_eq!(self.model, "");
        self.signal("TERM");
        assert!(self.wait().success());
        self.log()
    }

    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub fn get(&self, key: &str, path: &str) -> Reply {
        request(
            &self.listen,
            &format!("GET {path} HTTP/1.1\r\nAuthorization: Bearer {key}\r\n"),
            "",
        )
        .finish()
    }

    /// Sends a chat completion and returns when the head of its answer has arrived.
    pub fn chat(&self, key: &str, id: &str, body: &Value) -> Stream {
        self.chat_in("5f0f3b0a-3c0e-4c3a-9d4e-0b8f6d1c2a11", key, id, body)
    }

    /// The same in another session.
    pub fn chat_in(&self, session: &str, key: &str, id: &str, body: &Value) -> Stream {
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n\
             Idempotency-Key: {id}\r\nX-Service-Session-Id: {session}\r\n"
        );
        request(&self.listen, &head, &body.to_string())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Keeps reading, so that the child never blocks on a full pipe.
fn drain(
    stderr: impl Read + Send + 'static,
) -> (std::sync::Arc<Mutex<String>>, std::thread::JoinHandle<()>) {
    let log = std::sync::Arc::new(Mutex::new(String::new()));
    let kept = log.clone();
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            let mut kept = kept.lock().unwrap();
            kept.push_str(&line);
            kept.push('\n');
        }
    });
    (log, reader)
}

/// A whole answer.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: BTreeMap<String, String>,
    pub body: String,
}

impl Reply {
    /// A header by its name in small letters.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// An answer whose body is still arriving.
pub struct Stream {
    pub status: u16,
    headers: BTreeMap<String, String>,
    reader: BufReader<TcpStream>,
}

/// One request on a connection of its own. `head` is the request line and headers, each with its
/// line end.
pub fn request(base: &str, head: &str, body: &str) -> Stream {
    let address = base.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_mins(2))).unwrap();
    write!(
        stream,
        "{head}Host: {address}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let (mut reader, sent) = (BufReader::new(stream), Instant::now());
    let first = line(&mut reader);
    let status = first.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.unwrap_or_else(|| panic!("{first:?} after {:?}", sent.elapsed()));
    let headers = std::iter::from_fn(|| Some(line(&mut reader)).filter(|line| !line.is_empty()))
        .filter_map(|line| {
            line.split_once(": ").map(|(name, value)| (name.to_lowercase(), value.to_owned()))
        })
        .collect();
    Stream { status, headers, reader }
}

pub fn get(base: &str, path: &str) -> Reply {
    request(base, &format!("GET {path} HTTP/1.1\r\n"), "").finish()
}

fn line(reader: &mut BufReader<TcpStream>) -> String {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

impl Stream {
    /// A header by its name in small letters.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// Reads raw lines until one contains `needle`.
    pub fn read_until(&mut self, needle: &str) {
        let mut seen = String::new();
        while !seen.contains(needle) {
            seen.clear();
            assert_ne!(
                self.reader.read_line(&mut seen).unwrap(),
                0,
                "the stream ended before {needle:?}"
            );
        }
    }

    /// The rest of an answer of which a part was read, as it came over the wire.
    pub fn rest(mut self) -> String {
        let mut rest = String::new();
        self.reader.read_to_string(&mut rest).unwrap();
        rest
    }

    /// The whole answer, chunks joined.
    pub fn finish(mut self) -> Reply {
        let mut raw = Vec::new();
        self.reader.read_to_end(&mut raw).unwrap();
        let chunked = self.headers.get("transfer-encoding").is_some_and(|value| value == "chunked");
        let body = if chunked { join_chunks(&raw) } else { raw };
        Reply { status: self.status, headers: self.headers, body: String::from_utf8(body).unwrap() }
    }
}

fn join_chunks(mut raw: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = raw.windows(2).position(|pair| pair == b"\r\n") {
        let length = usize::from_str_radix(std::str::from_utf8(&raw[..end]).unwrap(), 16).unwrap();
        if length == 0 {
            break;
        }
        body.extend_from_slice(&raw[end + 2..end + 2 + length]);
        raw = &raw[end + 2 + length + 2..];
    }
    body
}

/// A shell that runs a script, for what starts the program in another way than [`Folder::command`].
/// Further arguments begin with `$0`.
pub fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    without_settings(&mut command);
    command
}

/// Keeps from a command what is set for these tests, or for another node.
fn without_settings(command: &mut Command) {
    for name in ["CRESSET_DATA_DIR", "CRESSET_CONFIG", "CRESSET_REQUIRE_POSTGRES", "NO_COLOR"] {
        command.env_remove(name);
    }
}

/// Waits until `done` says that another process has done something. Fails after a minute.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_mins(1), "{what}: still not so after a minute");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Copies folders and files; a node that was killed leaves its sockets.
fn copy(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target: PathBuf = to.join(entry.file_name());
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            std::fs::create_dir_all(&target).unwrap();
            copy(&entry.path(), &target);
        } else if kind.is_file() {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}
