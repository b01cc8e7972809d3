//! The node under a service manager: what it tells one, and the units that are written for it.

use super::process::{Folder, Served};
use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::Duration;

/// Receives until a message holds `wanted`, and returns all of them.
fn heard(manager: &UnixDatagram, wanted: &str) -> Vec<String> {
    let mut all = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let length = manager.recv(&mut buffer).unwrap_or_else(|error| panic!("{error}: {all:?}"));
        all.push(String::from_utf8_lossy(&buffer[..length]).trim_end().to_owned());
        if all.last().is_some_and(|last| last.lines().any(|line| line == wanted)) {
            return all;
        }
    }
}

#[test]
fn the_manager_hears_of_start_life_and_end() {
    let folder = Folder::ready();
    let socket = folder.path().join("manager");
    let manager = UnixDatagram::bind(&socket).unwrap();
    manager.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
    let mut command = folder.serve_command(&[]);
    command.env("NOTIFY_SOCKET", &socket).env("WATCHDOG_USEC", "200000");
    let mut node = Served::start(command);
    let start = heard(&manager, "READY=1");
    assert!(start.iter().any(|text| text == "STATUS=opening the ledger"), "{start:?}");
    heard(&manager, "WATCHDOG=1");
    heard(&manager, "WATCHDOG=1");
    node.signal("TERM");
    heard(&manager, "STOPPING=1");
    assert!(node.wait().success());
}

#[test]
fn units_are_written_whole() {
    let folder = Folder::ready();
    let [units, backups] = ["units", "backups"].map(|name| folder.path().join(name));
    std::fs::create_dir(&units).unwrap();
    let [units_text, backups_text] = [&units, &backups].map(|path| path.to_str().unwrap());
    let install = ["service", "install", "--units", units_text, "--backups", backups_text];
    let document = folder.json(&[&install[..], &["--keep", "2"]].concat());
    assert_eq!(document["written"].as_array().unwrap().len(), 3);
    let read = |name: &str| std::fs::read_to_string(units.join(name)).unwrap();
    let data = folder.path().to_str().unwrap();
    for name in ["cresset.service", "cresset-backup.service", "cresset-backup.timer"] {
        let unit = read(name);
        let is_place = |part: &str| part.len() > 2 && part.bytes().all(|c| c.is_ascii_uppercase());
        assert!(!unit.split('@').any(is_place), "a place is not filled in: {unit}");
    }
    let node = read("cresset.service");
    assert!(node.contains(&format!("ReadWritePaths={data} {backups_text}\n")), "{node}");
    let backup = read("cresset-backup.service");
    let start = backup.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
    let mut words = start.split(' ');
    let done = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    assert_eq!(std::fs::read_dir(&backups).unwrap().count(), 1);
    let spaced = folder.path().join("with space");
    let install = ["service", "install", "--units", units_text, "--backups"];
    let said = folder.fails(&[&install[..], &[spaced.to_str().unwrap()]].concat(), 1);
    assert!(said.contains("cannot stand in a unit"), "{said}");
}
