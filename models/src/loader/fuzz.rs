//! Gives arbitrary bytes to the readers of model files: they return an error or a file, never
//! panic, and use memory only in proportion to the file.

#![allow(unsafe_code, reason = "an allocator counts what the readers hold")]

use super::ModelSource;
use super::file::FileReader;
use super::gguf::GgufFile;
use super::safetensors::{Checkpoint, SINGLE};
use crate::testing::{GgufWriter, TinyLlama};
use cresset_base::{Mutation, mutated};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;

/// Bytes that a reader may hold at once for each byte of its file: a one-byte metadata value
/// becomes a `Value` of 32, in a growing list; the rest is for keys, maps and messages.
const BYTES_PER_BYTE: isize = 128;
const BYTES_AT_LEAST: isize = 64 << 10;

/// Counts the bytes that this thread holds, and the most it has held.
struct Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    let held = HELD.get() + bytes;
    HELD.set(held);
    MOST.set(MOST.get().max(held));
}

// SAFETY: every call is passed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Runs `read` and compares the memory it took with the file's length.
fn check(file: &Path, bytes: &[u8], read: impl FnOnce()) {
    std::fs::write(file, bytes).unwrap();
    let before = HELD.get();
    MOST.set(before);
    read();
    let took = MOST.get() - before;
    let allowed = BYTES_AT_LEAST + BYTES_PER_BYTE * bytes.len() as isize;
    assert!(took <= allowed, "{took} bytes held for a file of {}", bytes.len());
}

/// Returns files that differ little from sound ones, and an empty one.
fn seeds(sound: Vec<u8>) -> [Vec<u8>; 3] {
    let header = sound[..sound.len().min(4096)].to_vec();
    [sound, header, Vec::new()]
}

#[test]
fn gguf() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fuzz.gguf");
    let tiny = TinyLlama { layers: 1, hidden: 32, intermediate: 32, ..TinyLlama::default() }.gguf();
    let small = GgufWriter { tensors: tiny.tensors[1..3].to_vec(), ..tiny };
    let seeds = seeds(small.to_bytes());
    let seeds: Vec<&[u8]> = seeds.iter().map(Vec::as_slice).collect();
    bolero::check!().with_iterations(5_000).with_type().for_each(|mutation: &Mutation| {
        check(&file, &mutated(&seeds, mutation), || {
            let Ok(mut reader) = FileReader::open(&file, None) else { return };
            if let Ok(header) = GgufFile::read(&mut reader) {
                let mut tensors = header.tensors_in(vec![reader]);
                for (name, info) in &header.tensors {
                    assert_eq!(tensors.take(name).unwrap().len(), info.range.len());
                }
                tensors.finish().unwrap();
            }
        });
    });
}

#[test]
fn safetensors() {
    let folder = tempfile::tempdir().unwrap();
    TinyLlama { layers: 1, hidden: 32, intermediate: 32, ..TinyLlama::default() }
        .write_safetensors(folder.path())
        .unwrap();
    let file = folder.path().join(SINGLE);
    let seeds = seeds(std::fs::read(&file).unwrap());
    let seeds: Vec<&[u8]> = seeds.iter().map(Vec::as_slice).collect();
    bolero::check!().with_iterations(5_000).with_type().for_each(|mutation: &Mutation| {
        check(&file, &mutated(&seeds, mutation), || {
            let source = ModelSource::hf_folder(folder.path().to_owned());
            if let Ok(mut read) = Checkpoint::open(&source, folder.path(), None) {
                let names: Vec<String> = read.names().map(str::to_owned).collect();
                for name in names {
                    assert!(read.shape(&name).is_some());
                    read.take(&name).unwrap();
                }
                read.finish().unwrap();
            }
        });
    });
}
