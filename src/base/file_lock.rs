//! A lock on a file that keeps other processes out, for as long as its value lives.

use std::fs::{File, TryLockError};

/// Released when it is dropped, by a call of its own. Closing the file would not do: a process that
/// this one has just started holds a copy of every open file, and so the lock, until it runs its
/// program.
#[derive(Debug)]
pub struct FileLock(File);

impl FileLock {
    /// `WouldBlock` when another process, or another value in this one, has the lock.
    pub fn take(file: File) -> Result<Self, TryLockError> {
        file.try_lock()?;
        Ok(Self(file))
    }

    pub fn file(&self) -> &File {
        &self.0
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Where this fails, the lock ends with the last copy of the file.
        let _ = self.0.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_of_the_file_in_another_process_does_not_keep_the_lock() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let first = FileLock::take(file.reopen().unwrap()).unwrap();
        let copy = first.0.try_clone().unwrap();
        let second = FileLock::take(file.reopen().unwrap());
        assert!(matches!(second, Err(TryLockError::WouldBlock)));
        drop(first);
        FileLock::take(file.reopen().unwrap()).unwrap();
        drop(copy);
    }
}
