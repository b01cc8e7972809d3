//! A model that is split over several GGUF files, its shards. The first one has the metadata, each
//! has some of the tensors, and their names count them: `NAME-00001-of-00003.gguf`.

use super::super::file::{Bytes, FileReader, TensorReader};
use super::{GgufFile, TensorInfo, Value};
use crate::error::damaged;
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::path::Path;

/// The digits of each number in the name of a shard.
const DIGITS: usize = 5;

/// The name of a shard, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardName<'a> {
    /// The part before the numbers, which the names of all shards have in common.
    pub stem: &'a str,
    /// Its number, from 1 to `count`.
    pub number: usize,
    pub count: usize,
}

impl<'a> ShardName<'a> {
    /// `None`: not a shard's name.
    pub fn parse(name: &'a str) -> Option<Self> {
        let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| {
            let sound = text.len() == DIGITS && text.bytes().all(|byte| byte.is_ascii_digit());
            if sound { text.parse().ok() } else { None }
        };
        let (number, count) = (digits(number)?, digits(count)?);
        (1..=count).contains(&number).then_some(Self { stem, number, count })
    }

    /// The names of all shards, in order.
    pub fn all(self) -> impl Iterator<Item = String> {
        let Self { stem, count, .. } = self;
        let stem = stem.to_owned();
        (1..=count).map(move |number| format!("{stem}-{number:05}-of-{count:05}.gguf"))
    }
}

/// The tensors of all shards.
pub(in crate::loader) struct ShardReaders {
    readers: Vec<TensorReader>,
    shards: BTreeMap<String, usize>,
}

impl ShardReaders {
    pub(in crate::loader) fn take(&mut self, name: &str) -> Result<Bytes> {
        self.readers[self.shards[name]].take(name)
    }

    pub(in crate::loader) fn finish(self) -> Result<()> {
        self.readers.into_iter().try_for_each(TensorReader::finish)
    }
}

impl GgufFile {
    /// Reads the headers of a model whose first file is at `path`. `open` opens a file of its
    /// folder by name. Returns the files, of which no range was read.
    pub(in crate::loader) fn read_all(
        path: &Path,
        open: &dyn Fn(&str) -> Result<FileReader>,
    ) -> Result<(Self, Vec<FileReader>)> {
        let name = file_name(path);
        let mut files = vec![open(&name)?];
        let mut whole = Self::read(&mut files[0])?;
        let count = whole.split("count").unwrap_or(1);
        if count <= 1 {
            return Ok((whole, files));
        }
        for name in whole.shard_names(&name, count)?.into_iter().skip(1) {
            let mut file = open(&name).map_err(|error| missing(error, count))?;
            whole.join(&Self::read(&mut file)?, files.len(), count)?;
            files.push(file);
        }
        match whole.split("tensors.count") {
            Some(tensors) if tensors != whole.tensors.len() => Err(whole.refused(&format!(
                "its shards have {} tensors instead of {tensors} (split.tensors.count)",
                whole.tensors.len()
            ))),
            _ => Ok((whole, files)),
        }
    }

    /// A reader of the tensors in the rest of the files.
    pub(in crate::loader) fn tensors_in(&self, files: Vec<FileReader>) -> ShardReaders {
        let shards = self.tensors.iter().map(|(name, info)| (name.clone(), info.shard)).collect();
        let of_shard = |(shard, file): (usize, FileReader)| {
            let own = self.tensors.iter().filter(|(_, info)| info.shard == shard);
            let ranges: Vec<_> =
                own.map(|(name, info)| (name.clone(), info.range.clone())).collect();
            TensorReader::new(file, ranges.into_iter())
        };
        ShardReaders { readers: files.into_iter().enumerate().map(of_shard).collect(), shards }
    }

    fn split(&self, key: &str) -> Option<usize> {
        self.metadata.get(&format!("split.{key}")).and_then(Value::as_usize)
    }

    fn refused(&self, what: &str) -> Error {
        damaged(self.path(), what)
    }

    /// The names of the shards of a model, of which this is the first one.
    fn shard_names(&self, name: &str, count: usize) -> Result<Vec<String>> {
        let path = self.path().display();
        match ShardName::parse(name) {
            Some(shard) if shard.count == count && shard.number == 1 => Ok(shard.all().collect()),
            Some(shard) if shard.count == count => {
                let first = shard.all().next().unwrap_or_default();
                Err(Error::Unsupported(format!(
                    "{path} is a part of a model that is split into {count} files: give the first \
                     one, {first}"
                )))
            }
            _ => Err(Error::Unsupported(format!(
                "{path} is a part of a model that is split into {count} files (split.count), and \
                 its name does not end with -00001-of-{count:05}.gguf: give the files the names \
                 that they were published with"
            ))),
        }
    }

    /// Adds the tensors of the shard with this index.
    fn join(&mut self, shard: &Self, index: usize, count: usize) -> Result<()> {
        if (shard.split("no"), shard.split("count")) != (Some(index), Some(count)) {
            let number = index + 1;
            return Err(shard.refused(&format!(
                "it is not shard {number} of {count} of its model (split.no, split.count)"
            )));
        }
        for (name, info) in &shard.tensors {
            let info = TensorInfo { shard: index, ..info.clone() };
            if self.tensors.insert(name.clone(), info).is_some() {
                return Err(shard.refused(&format!("tensor {name:?} is in two shards")));
            }
        }
        Ok(())
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn missing(error: Error, count: usize) -> Error {
    match error {
        Error::Io { path, source } if source.kind() == std::io::ErrorKind::NotFound => {
            Error::BadFile(format!(
                "{} is missing: the model is split into {count} files, which must all be in one \
                 folder; fetch it",
                path.display()
            ))
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::GgufWriter;
    use std::path::PathBuf;

    /// Three shards of a model of four tensors, the middle one without any but two others.
    fn split(folder: &Path) -> Vec<PathBuf> {
        let names = ShardName { stem: "tiny", number: 1, count: 3 }.all();
        let write = |(shard, name): (usize, String)| {
            let mut writer = GgufWriter::default();
            writer.set("split.no", Value::U16(shard as u16));
            writer.set("split.count", Value::U16(3));
            writer.set("split.tensors.count", Value::I32(4));
            if shard == 0 {
                writer.set("general.architecture", Value::String("llama".into()));
            }
            let own: &[&str] = [&["a"][..], &["d", "b"], &["c"]][shard];
            for name in own {
                writer.f32(name, &[2], &[shard as f32, name.len() as f32]);
            }
            let path = folder.join(name);
            std::fs::write(&path, writer.to_bytes()).unwrap();
            path
        };
        names.enumerate().map(write).collect()
    }

    fn change(path: &Path, change: impl Fn(&mut GgufWriter)) {
        let header = GgufFile::read(&mut FileReader::open(path, None).unwrap()).unwrap();
        let bytes = std::fs::read(path).unwrap();
        let mut writer =
            GgufWriter { metadata: header.metadata.into_iter().collect(), tensors: Vec::new() };
        for (name, info) in header.tensors {
            writer.tensors.push((name, info.shape, info.dtype, bytes[info.range].to_vec()));
        }
        change(&mut writer);
        std::fs::write(path, writer.to_bytes()).unwrap();
    }

    #[test]
    fn names_of_shards_are_taken_apart() {
        let shard = |stem, number, count| Some(ShardName { stem, number, count });
        for (name, expect) in [
            ("m-00001-of-00002.gguf", shard("m", 1, 2)),
            ("a/m-Q4_K-00012-of-00012.gguf", shard("a/m-Q4_K", 12, 12)),
            ("m.gguf", None),
            ("m-1-of-2.gguf", None),
            ("m-00003-of-00002.gguf", None),
            ("m-00000-of-00002.gguf", None),
            ("m-00001-of-00002.safetensors", None),
            ("m-+0001-of-00002.gguf", None),
        ] {
            assert_eq!(ShardName::parse(name), expect, "{name}");
        }
        let all: Vec<String> = ShardName::parse("m-00002-of-00002.gguf").unwrap().all().collect();
        assert_eq!(all, ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]);
    }

    #[test]
    fn shards_are_read_as_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let paths = split(folder.path());
        let open = |name: &str| FileReader::open(&folder.path().join(name), None);
        let (whole, files) = GgufFile::read_all(&paths[0], &open).unwrap();
        assert_eq!(whole.tensors.len(), 4);
        let mut tensors = whole.tensors_in(files);
        for (name, shard) in [("c", 2f32), ("b", 1.0), ("a", 0.0), ("d", 1.0)] {
            assert_eq!(tensors.take(name).unwrap()[..4], shard.to_le_bytes(), "{name}");
        }
        tensors.finish().unwrap();
    }

    #[test]
    fn a_shard_that_is_missing_or_another_ones_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let paths = split(folder.path());
        let refused = |path: &Path, parts: &[&str]| {
            let error = GgufFile::open(path).err().expect("it is refused").to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        };
        refused(&paths[1], &["00002-of-00003", "give the first one, tiny-00001-of-00003.gguf"]);
        let renamed = folder.path().join("renamed.gguf");
        std::fs::copy(&paths[0], &renamed).unwrap();
        refused(&renamed, &["renamed.gguf", "-00001-of-00003.gguf"]);
        change(&paths[2], |w| w.set("split.no", Value::U16(1)));
        refused(&paths[0], &["tiny-00003-of-00003.gguf", "not shard 3 of 3"]);
        change(&paths[2], |w| w.set("split.no", Value::U16(2)));
        change(&paths[2], |w| w.f32("b", &[1], &[0.0]));
        refused(&paths[0], &["tiny-00003-of-00003.gguf", "\"b\" is in two shards"]);
        change(&paths[2], |w| w.tensors.clear());
        refused(&paths[0], &["3 tensors instead of 4"]);
        std::fs::remove_file(&paths[1]).unwrap();
        refused(&paths[0], &["tiny-00002-of-00003.gguf is missing", "3 files"]);
    }
}
