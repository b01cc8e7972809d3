//! Fetches from a folder on this machine, or from the file itself.

use super::super::Error;
use super::incoming::receive;
use super::{SourceFailure, Want};
use std::fs::File;
use std::path::Path;

pub(super) fn fetch(path: &Path, want: &mut Want) -> Result<(), SourceFailure> {
    let file = if path.is_dir() { path.join(&want.file.name) } else { path.to_owned() };
    if !file.is_file() {
        return Err(SourceFailure::Source(format!("there is no file {}", file.display())));
    }
    receive(&mut File::open(&file).map_err(Error::io("open", &file))?, want)
}
