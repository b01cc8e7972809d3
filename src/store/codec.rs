//! How rows become bytes: `[version][fields in order, big-endian][crc32c of key, version and
//! fields]`.
//! The layout is written by hand because the own layout of a database library or a serializer may
//! change with its next version, and stored money may not.

use cresset_ledger::{StateError, StateResult};
use std::cmp::Ordering;
use uuid::Uuid;

const CRC_BYTES: usize = 4;

/// A value with a fixed layout, such as a field of a row or a whole row.
pub trait StoredField: Sized {
    /// The version of the type's layout as a row, the first byte of the row. A later layout must
    /// read all earlier ones.
    const VERSION: u8 = 1;

    fn write(&self, out: &mut Vec<u8>);
    fn read(input: &mut Reader<'_>) -> Result<Self, Malformed>;

    /// Reads a row of an earlier version.
    fn read_earlier(_version: u8, _input: &mut Reader<'_>) -> Result<Self, Malformed> {
        Err(Malformed("unknown row version"))
    }
}

/// Why bytes are not a row of the expected type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

/// The stored form of `row` under `key`.
pub fn encode<T: StoredField>(key: &[u8], row: &T) -> Vec<u8> {
    let mut bytes = vec![T::VERSION];
    row.write(&mut bytes);
    let crc = checksum(key, &bytes);
    bytes.extend(crc.to_be_bytes());
    bytes
}

/// The row stored under `key`. The checksum covers the key, so a row moved to another place is
/// damaged too.
pub fn decode<T: StoredField>(key: &[u8], stored: &[u8]) -> StateResult<T> {
    try_decode(key, stored).map_err(|Malformed(why)| {
        let key = hex::encode(key);
        StateError::Corrupt(format!("{why}, under key {key}"))
    })
}

fn try_decode<T: StoredField>(key: &[u8], stored: &[u8]) -> Result<T, Malformed> {
    let (bytes, crc) = stored.split_last_chunk::<CRC_BYTES>().ok_or(Malformed("too short"))?;
    if checksum(key, bytes) != u32::from_be_bytes(*crc) {
        return Err(Malformed("wrong checksum"));
    }
    let (version, rest) = bytes.split_first().ok_or(Malformed("too short"))?;
    let mut input = Reader { rest, row_version: *version };
    let row = match version.cmp(&T::VERSION) {
        Ordering::Equal => T::read(&mut input)?,
        Ordering::Less => T::read_earlier(*version, &mut input)?,
        Ordering::Greater => return Err(Malformed("unknown row version")),
    };
    let exact = input.rest.is_empty();
    exact.then_some(row).ok_or(Malformed("bytes left over"))
}

fn checksum(key: &[u8], bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(key), bytes)
}

/// The bytes of a row that were not read yet.
pub struct Reader<'a> {
    rest: &'a [u8],
    row_version: u8,
}

impl<'a> Reader<'a> {
    /// The version of the row that is read, for fields whose layout has changed with it.
    pub(crate) fn row_version(&self) -> u8 {
        self.row_version
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], Malformed> {
        let (front, rest) = self.rest.split_at_checked(length).ok_or(Malformed("too short"))?;
        self.rest = rest;
        Ok(front)
    }

    fn length(&mut self) -> Result<usize, Malformed> {
        u32::read(self).map(|length| length as usize)
    }
}

fn write_length(length: usize, out: &mut Vec<u8>) {
    u32::try_from(length).expect("invariant: a row is far below 4 GiB").write(out);
}

impl StoredField for () {
    fn write(&self, _: &mut Vec<u8>) {}
    fn read(_: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(())
    }
}

impl<const N: usize> StoredField for [u8; N] {
    fn write(&self, out: &mut Vec<u8>) {
        out.extend(self);
    }
    fn read(input: &mut Reader<'_>) -> Result<Self, Malformed> {
        let bytes = input.take(N)?;
        Ok(bytes.try_into().expect("invariant: took N bytes"))
    }
}

macro_rules! integers {
    ($($type:ty),+) => {$(
        impl StoredField for $type {
            fn write(&self, out: &mut Vec<u8>) {
                self.to_be_bytes().write(out);
            }
            fn read(input: &mut Reader<'_>) -> Result<Self, Malformed> {
                StoredField::read(input).map(Self::from_be_bytes)
            }
        }
    )+};
}

integers!(u8, u32, u64);

impl StoredField for bool {
    fn write(&self, out: &mut Vec<u8>) {
        u8::from(*self).write(out);
    }
    fn read(input: &mut Reader<'_>) -> Result<Self, Malformed> {
        match u8::read(input)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed("neither true nor false")),
        }
    }
}

impl StoredField for Uuid {
    fn write(&self, out: &mut Vec<u8>) {
        self.as_bytes().write(out);
    }
    fn read(input: &mut Reader<'_>) -> Result<Self, Malformed> {
        StoredField::read(input).map(Self::from_bytes)
    }
}

impl StoredField for String {
    fn write(&self, out: &mut Vec<u8>) {
        write_length(self.len(), out);
        out.extend(self.as_bytes());
    }
    fn read(input: &mut Reader<'_>) -> Result<Self, Malformed> {
        let length = input.length()?;
        let bytes = input.take(length)?.to_vec();
        Self::from_utf8(bytes).map_err(|_| Malformed("text is not UTF-8"))
    }
}

impl StoredField for bytes::Bytes {
    fn write(&self, out: &mut Vec<u8>) {
        write_length(self.len(), out);
        out.extend_from_slice(self);
    }
    fn read(input: &mut Reader<'_>) -> Result<Self, Malformed> {
        let length = input.length()?;
        input.take(length).map(Self::copy_from_slice)
    }
}

impl<T: StoredField> StoredField for Option<T> {
    fn write(&self, out: &mut Vec<u8>) {
        self.is_some().write(out);
        if let Some(value) = self {
            value.write(out);
        }
    }
    fn read(input: &mut Reader<'_>) -> Result<Self, Malformed> {
        bool::read(input)?.then(|| T::read(input)).transpose()
    }
}

impl<T: StoredField> StoredField for Vec<T> {
    fn write(&self, out: &mut Vec<u8>) {
        write_length(self.len(), out);
        for value in self {
            value.write(out);
        }
    }
    fn read(input: &mut Reader<'_>) -> Result<Self, Malformed> {
        let length = input.length()?;
        (0..length).map(|_| T::read(input)).collect()
    }
}

/// Lays out a struct: the fields in the order given here, which never changes. With a version above
/// 1, the same fields are read from rows of earlier ones, where a field knows its own.
#[macro_export]
macro_rules! row {
    ($type:ident { $($field:ident),+ $(,)? } $(version $version:literal)?) => {
        impl $crate::codec::StoredField for $type {
            $(const VERSION: u8 = $version;

            fn read_earlier(
                _: u8,
                input: &mut $crate::codec::Reader<'_>,
            ) -> Result<Self, $crate::codec::Malformed> {
                Self::read(input)
            })?

            fn write(&self, out: &mut Vec<u8>) {
                $($crate::codec::StoredField::write(&self.$field, out);)+
            }
            fn read(
                input: &mut $crate::codec::Reader<'_>,
            ) -> Result<Self, $crate::codec::Malformed> {
                $(let $field = $crate::codec::StoredField::read(input)?;)+
                Ok(Self { $($field),+ })
            }
        }
    };
}

/// Lays out an enum without fields: one byte, whose meaning never changes.
macro_rules! codes {
    ($type:ident { $($code:literal => $variant:ident),+ $(,)? }) => {
        impl StoredField for $type {
            fn write(&self, out: &mut Vec<u8>) {
                out.push(match self { $(Self::$variant => $code),+ });
            }
            fn read(input: &mut Reader<'_>) -> Result<Self, Malformed> {
                match u8::read(input)? {
                    $($code => Ok(Self::$variant),)+
                    _ => Err(Malformed("unknown code")),
                }
            }
        }
    };
}

/// Lays out a newtype as its inner value.
macro_rules! wrapper {
    ($($type:ident),+ $(,)?) => {$(
        impl StoredField for $type {
            fn write(&self, out: &mut Vec<u8>) {
                self.0.write(out);
            }
            fn read(input: &mut Reader<'_>) -> Result<Self, Malformed> {
                StoredField::read(input).map(Self)
            }
        }
    )+};
}

pub(super) use {codes, wrapper};
