//! A folder (or the file itself) on this machine.

use super::super::Error;
use super::incoming::receive;
use super::{Failure, Want};
use std::fs::File;
use std::path::Path;

pub(super) fn fetch(path: &Path, want: &mut Want) -> Result<(), Failure> {
    let file = if path.is_dir() { path.join(&want.file.name) } else { path.to_owned() };
    if !file.is_file() {
        return Err(Failure::Source(format!("there is no file {}", file.display())));
    }
    receive(&mut File::open(&file).map_err(Error::io("open", &file))?, want)
}
