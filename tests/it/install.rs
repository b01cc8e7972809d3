//! The script that installs the program: from a folder and over HTTP, and all that it refuses
//! without a change.

use crate::process::{Folder, shell};
use axum::Router;
use axum::extract::{Path as Name, State};
use axum::http::StatusCode;
use axum::routing::get;
use sha2::{Digest, Sha256};
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use tokio::net::TcpListener;

const PROGRAM: &str = "cresset-x86_64-linux";
const VERSION: &str = concat!("cresset ", env!("CARGO_PKG_VERSION"));
const SCRIPT: &str = concat!("#!/bin/sh\necho cresset ", env!("CARGO_PKG_VERSION"), "\n");

/// A packed program, and a prefix where an older one lies.
struct Package {
    folder: Folder,
    at: PathBuf,
    prefix: PathBuf,
}

impl Package {
    fn new() -> Self {
        let folder = Folder::empty();
        let (at, prefix) = (folder.path().join("package"), folder.path().join("prefix"));
        let document = folder.json(&["package", at.to_str().unwrap()]);
        assert_eq!(document["written"].as_array().unwrap().len(), 3);
        fs::create_dir_all(prefix.join("bin")).unwrap();
        fs::write(prefix.join("bin/cresset"), "an older one").unwrap();
        Self { folder, at, prefix }
    }

    /// Puts a script in place of the program, which is large, and returns its digest.
    fn replace(&self, script: &str) -> String {
        let digest = hex::encode(Sha256::digest(script));
        fs::write(self.at.join(PROGRAM), script).unwrap();
        fs::write(self.at.join("SHA256SUMS"), format!("{digest}  {PROGRAM}\n")).unwrap();
        digest
    }

    fn install(&self, arguments: &[&str]) -> Output {
        self.command().args(arguments).output().unwrap()
    }

    fn command(&self) -> Command {
        let mut command = shell("exec sh \"$@\"");
        command.arg("sh").arg(self.at.join("install.sh")).arg("--prefix").arg(&self.prefix);
        command
    }

    /// What lies at the place of the program, and nothing else may lie beside it.
    fn installed(&self) -> Vec<u8> {
        let bin = self.prefix.join("bin");
        assert_eq!(fs::read_dir(&bin).unwrap().count(), 1, "nothing else is left");
        fs::read(bin.join("cresset")).unwrap()
    }

    fn installs(&self, arguments: &[&str]) {
        let output = self.install(arguments);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{output:?}");
        assert!(said.starts_with(VERSION) && said.contains("quickstart"), "{said}");
        let program = self.prefix.join("bin/cresset");
        assert_eq!(fs::metadata(&program).unwrap().permissions().mode() & 0o777, 0o755);
        assert_eq!(self.installed(), fs::read(self.at.join(PROGRAM)).unwrap());
        fs::write(&program, "an older one").unwrap();
    }

    fn refuses(&self, output: &Output, why: &str) {
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(said.contains(why), "{why} is not in {said}");
        assert_eq!(self.installed(), b"an older one", "{why}");
    }
}

#[test]
fn a_program_that_is_whole_takes_the_place_of_an_older_one() {
    let package = Package::new();
    package.installs(&[]);
    let digest = package.replace(SCRIPT);
    package.installs(&["--from", package.at.to_str().unwrap()]);
    let (program, sums) = (package.at.join(PROGRAM), package.at.join("SHA256SUMS"));

    fs::write(&sums, "00  another\n").unwrap();
    package.refuses(&package.install(&[]), "does not name cresset-x86_64-linux");
    package.installs(&["--sha256", &digest]);
    fs::write(&sums, format!("{}  {PROGRAM}\n", "0".repeat(64))).unwrap();
    package.refuses(&package.install(&[]), "and should have 000");

    package.replace(SCRIPT);
    for changed in [SCRIPT.trim_end(), &SCRIPT.replace('0', "1")] {
        fs::write(&program, changed).unwrap();
        package.refuses(&package.install(&[]), "has the SHA-256");
    }
    fs::remove_file(&program).unwrap();
    package.refuses(&package.install(&[]), "cannot be read");
    package.replace("#!/bin/sh\nexit 3\n");
    package.refuses(&package.install(&[]), "does not start on this machine");
}

#[test]
fn systems_without_proof_and_places_without_right_are_told_in_a_sentence() {
    let package = Package::new();
    let tools = package.folder.path().join("tools");
    fs::create_dir(&tools).unwrap();
    let uname = tools.join("uname");
    fs::write(&uname, "#!/bin/sh\n[ $1 = -s ] && echo Darwin || echo arm64\n").unwrap();
    fs::set_permissions(&uname, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:/usr/bin:/bin", tools.display());
    let output = package.command().env("PATH", path).output().unwrap();
    package.refuses(&output, "this is Darwin on arm64: nothing was changed");
    assert_eq!(String::from_utf8(output.stderr).unwrap().lines().count(), 1, "one sentence");

    let file = package.folder.path().join("package/SHA256SUMS/below");
    let output = package.install(&["--prefix", file.to_str().unwrap()]);
    package.refuses(&output, "choose another folder with --prefix");
    package.refuses(&package.install(&["--from", "http://example.com/x"]), "--sha256");
    package.refuses(&package.install(&["--from"]), "--from needs a value");
    assert_eq!(package.install(&["--colour"]).status.code(), Some(2));
}

async fn serve(folder: PathBuf) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let file = async |State(folder): State<PathBuf>, Name(name): Name<String>| {
        fs::read(folder.join(name)).map_err(|_| StatusCode::NOT_FOUND)
    };
    let routes = Router::new().route("/{name}", get(file)).with_state(folder);
    tokio::spawn(async move { axum::serve(listener, routes).await });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_is_fetched_from_an_address() {
    let package = Package::new();
    package.replace(SCRIPT);
    let from = format!("http://{}/", serve(package.at.clone()).await);
    let check = tokio::task::spawn_blocking(move || {
        package.installs(&["--from", &from]);
        fs::remove_file(package.at.join("SHA256SUMS")).unwrap();
        package.refuses(&package.install(&["--from", &from]), "SHA256SUMS cannot be read");
        fs::write(package.at.join(PROGRAM), "another").unwrap();
        let digest = "0".repeat(64);
        let output = package.install(&["--from", &from, "--sha256", &digest]);
        package.refuses(&output, "has the SHA-256");
    });
    check.await.unwrap();
}
