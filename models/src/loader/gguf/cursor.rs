//! Bounded reading of little-endian values: a false length causes an error and never an allocation.

use super::value::Value;
use crate::loader::file::FileReader;

/// The error says what is wrong; the caller adds the file's name.
pub(super) type Parse<T> = Result<T, String>;

/// Limit of the metadata values of one file, array elements included: several times the largest
/// vocabulary.
const MAX_VALUES: usize = 1 << 23;
const MAX_NESTING: usize = 4;

pub(super) struct Cursor<'a> {
    file: &'a mut FileReader,
    at: usize,
    values_left: usize,
}

impl<'a> Cursor<'a> {
    /// Peeks into a file of which no range was read.
    pub(super) fn new(file: &'a mut FileReader) -> Self {
        Self { file, at: 0, values_left: MAX_VALUES }
    }

    pub(super) fn position(&self) -> usize {
        self.at
    }

    fn left(&self) -> usize {
        self.file.len() - self.at
    }

    pub(super) fn take(&mut self, len: usize) -> Parse<&[u8]> {
        if len > self.left() {
            return Err(format!(
                "the header ends at byte {}, {len} more bytes were expected",
                self.file.len()
            ));
        }
        let from = self.at;
        self.at += len;
        let bytes = self.file.peek(self.at).map_err(|error| error.to_string())?;
        Ok(&bytes[from..])
    }

    fn array<const N: usize>(&mut self) -> Parse<[u8; N]> {
        let bytes = self.take(N)?;
        Ok(bytes.try_into().expect("invariant: `take` returns as many bytes as asked for"))
    }

    pub(super) fn u32(&mut self) -> Parse<u32> {
        self.array().map(u32::from_le_bytes)
    }

    /// Reads a 64-bit size.
    pub(super) fn size(&mut self) -> Parse<usize> {
        let size = self.array().map(u64::from_le_bytes)?;
        size.try_into().map_err(|_| format!("size {size} is beyond this machine's memory"))
    }

    /// Reads a 64-bit count of items that take at least `bytes_each`.
    pub(super) fn count(&mut self, what: &str, bytes_each: usize) -> Parse<usize> {
        let count = self.size()?;
        if count > self.left() / bytes_each {
            return Err(format!("it claims {count} {what} entries, more than its bytes can hold"));
        }
        Ok(count)
    }

    pub(super) fn string(&mut self) -> Parse<String> {
        let len = self.count("string", 1)?;
        let bytes = self.take(len)?.to_vec();
        String::from_utf8(bytes).map_err(|_| format!("text before byte {} is not UTF-8", self.at))
    }

    pub(super) fn value(&mut self, kind: u32, depth: usize) -> Parse<Value> {
        self.values_left =
            self.values_left.checked_sub(1).ok_or("there are too many metadata values")?;
        Ok(match kind {
            0 => Value::U8(u8::from_le_bytes(self.array()?)),
            1 => Value::I8(i8::from_le_bytes(self.array()?)),
            2 => Value::U16(u16::from_le_bytes(self.array()?)),
            3 => Value::I16(i16::from_le_bytes(self.array()?)),
            4 => Value::U32(self.u32()?),
            5 => Value::I32(i32::from_le_bytes(self.array()?)),
            6 => Value::F32(f32::from_le_bytes(self.array()?)),
            7 => self.boolean()?,
            8 => Value::String(self.string()?),
            9 => self.values(depth)?,
            10 => Value::U64(u64::from_le_bytes(self.array()?)),
            11 => Value::I64(i64::from_le_bytes(self.array()?)),
            12 => Value::F64(f64::from_le_bytes(self.array()?)),
            _ => return Err(format!("value type {kind} does not exist")),
        })
    }

    fn boolean(&mut self) -> Parse<Value> {
        match self.array()? {
            [0] => Ok(Value::Bool(false)),
            [1] => Ok(Value::Bool(true)),
            [other] => Err(format!("a boolean is {other}")),
        }
    }

    fn values(&mut self, depth: usize) -> Parse<Value> {
        if depth == MAX_NESTING {
            return Err(format!("arrays are nested deeper than {MAX_NESTING}"));
        }
        let kind = self.u32()?;
        let count = self.count("array", 1)?;
        if count > self.values_left {
            return Err(format!("an array claims {count} values"));
        }
        (0..count).map(|_| self.value(kind, depth + 1)).collect::<Parse<_>>().map(Value::Array)
    }
}
