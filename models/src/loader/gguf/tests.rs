//! Damaged, truncated and inconsistent GGUF files are refused with a reason; sound ones are read
//! whole.

use super::*;
use crate::testing::{GgufWriter, TinyLlama};

fn small() -> GgufWriter {
    let tensor = |name: &str, shape: &[usize]| {
        let data =
            (0..shape.iter().product::<usize>()).flat_map(|i| (i as f32).to_le_bytes()).collect();
        (name.to_owned(), shape.to_vec(), WeightType::F32, data)
    };
    GgufWriter {
        metadata: vec![
            ("general.architecture".into(), Value::String("llama".into())),
            (
                "a.list".into(),
                Value::Array(vec![
                    Value::Array(vec![Value::I64(-1)]),
                    Value::Array(vec![Value::I64(2)]),
                ]),
            ),
            ("b.flag".into(), Value::Bool(true)),
            ("c.float".into(), Value::F64(0.5)),
        ],
        tensors: vec![tensor("first", &[2, 3]), tensor("second", &[5]), tensor("third", &[1])],
    }
}

fn open(bytes: &[u8]) -> Result<GgufFile> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    GgufFile::open(file.path())
}

/// The tensors of a file in an order that is not the file's.
fn contents(bytes: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    let mut reader = FileReader::open(file.path(), None).unwrap();
    let header = GgufFile::read(&mut reader).unwrap();
    let mut tensors = header.tensors_in(vec![reader]);
    let read = |name: &String| (name.clone(), tensors.take(name).unwrap().to_vec());
    let all = header.tensors.keys().rev().map(read).collect();
    tensors.finish().unwrap();
    all
}

fn replace(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let at = bytes.windows(from.len()).position(|w| w == from).expect("the pattern is there");
    [&bytes[..at], to, &bytes[at + from.len()..]].concat()
}

fn check_refused(bytes: &[u8], message: &str) {
    match open(bytes) {
        Err(Error::BadFile(text)) => {
            assert!(text.contains(message), "{text:?} does not say {message:?}");
            assert!(text.contains("fetch it again"), "{text:?} does not say what to do");
        }
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("accepted, expected {message:?}"),
    }
}

#[test]
fn reads_what_was_written() {
    let (written, bytes) = (small(), small().to_bytes());
    let file = open(&bytes).unwrap();
    for (key, value) in &written.metadata {
        assert_eq!(&file.metadata[key], value);
    }
    let contents = contents(&bytes);
    for (name, shape, dtype, data) in &written.tensors {
        let info = &file.tensors[name];
        assert_eq!((&info.shape, info.dtype, &contents[name]), (shape, *dtype, data));
    }
}

#[test]
fn version_2_is_read_too() {
    let bytes = replace(&small().to_bytes(), &3u32.to_le_bytes(), &2u32.to_le_bytes());
    assert_eq!(open(&bytes).unwrap().tensors.len(), 3);
}

#[test]
fn every_truncation_is_refused() {
    let bytes = small().to_bytes();
    for len in 0..bytes.len() {
        assert!(
            matches!(open(&bytes[..len]), Err(Error::BadFile(_))),
            "{len} of {} bytes",
            bytes.len()
        );
    }
}

/// After any flip of a bit, reading the file ends, stays in bounds and does not panic.
#[test]
fn no_byte_flip_leads_out_of_bounds() {
    let bytes = small().to_bytes();
    for at in 0..bytes.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut damaged = bytes.clone();
            damaged[at] ^= flip;
            if let Ok(header) = open(&damaged) {
                assert!(header.tensors.values().all(|t| t.range.end <= damaged.len()), "byte {at}");
            }
        }
    }
}

#[test]
fn damage_is_named() {
    let bytes = small().to_bytes();
    let u64s = u64::to_le_bytes;
    let name = |n: &str| [&u64s(n.len() as u64)[..], n.as_bytes()].concat();
    check_refused(&[], "empty");
    check_refused(&replace(&bytes, b"GGUF", b"GGML"), "magic");
    check_refused(&replace(&bytes, &3u32.to_le_bytes(), &9u32.to_le_bytes()), "version 9");
    check_refused(&replace(&bytes, &u64s(3), &u64s(u64::MAX)), "tensor entries");
    check_refused(&replace(&bytes, &u64s(4), &u64s(1 << 40)), "metadata entries");
    check_refused(&replace(&bytes, &name("b.flag"), &name("a.list")), "twice");
    check_refused(&replace(&bytes, b"second", b"\xffecond"), "UTF-8");
    check_refused(
        &replace(&bytes, b"b.flag\x07\0\0\0\x01", b"b.flag\x07\0\0\0\x02"),
        "a boolean is 2",
    );
    check_refused(&replace(&bytes, b"b.flag\x07", b"b.flag\x63"), "value type 99");
}

/// The entry of `second`: a name, one dimension of 5, F32, at offset 32.
fn entry(dimensions: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut out = b"second".to_vec();
    out.extend((dimensions.len() as u32).to_le_bytes());
    for dimension in dimensions {
        out.extend(dimension.to_le_bytes());
    }
    out.extend(kind.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out
}

#[test]
fn impossible_tensors_are_named() {
    let bytes = small().to_bytes();
    let with = |new: Vec<u8>| replace(&bytes, &entry(&[5], 0, 32), &new);
    for (new, message) in [
        (entry(&[5], 0, 33), "not aligned"),
        (entry(&[5], 0, 0), "overlap"),
        (entry(&[5], 0, 1 << 20), "ends beyond"),
        (entry(&[5], 0, u64::MAX - 31), "ends beyond"),
        (entry(&[u64::MAX], 0, 32), "impossible shape"),
        (entry(&[0], 0, 32), "impossible shape"),
        (entry(&[5], 2, 32), "impossible shape"),
        (entry(&[5], 777, 32), "unknown type"),
    ] {
        check_refused(&with(new), message);
    }
    let twice = replace(&bytes, b"third", b"first");
    check_refused(&twice, "twice");
}

#[test]
fn sound_files_of_other_kinds_are_unsupported() {
    let bytes = small().to_bytes();
    for other in [
        replace(&bytes, &3u32.to_le_bytes(), &1u32.to_le_bytes()),
        replace(&bytes, &3u32.to_le_bytes(), &3u32.to_be_bytes()),
        replace(&bytes, &entry(&[5], 0, 32), &entry(&[5], 28, 32)),
    ] {
        assert!(matches!(open(&other), Err(Error::Unsupported(_))));
    }
}

#[test]
fn a_false_array_length_costs_no_memory() {
    let mut writer = small();
    writer.metadata.push(("z".into(), Value::Array(vec![Value::U8(1); 8])));
    let bytes = replace(
        &writer.to_bytes(),
        &[&0u32.to_le_bytes()[..], &8u64.to_le_bytes()].concat(),
        &[&0u32.to_le_bytes()[..], &(1u64 << 45).to_le_bytes()].concat(),
    );
    check_refused(&bytes, "array entries");
}

#[test]
fn the_tiny_model_is_a_sound_file() {
    let file = open(&TinyLlama::default().gguf().to_bytes()).unwrap();
    assert_eq!(file.metadata["llama.block_count"].as_usize(), Some(2));
    assert_eq!(file.tensors["blk.1.attn_k.weight"].shape, [32, 64]);
}
