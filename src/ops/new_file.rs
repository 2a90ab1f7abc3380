//! A file that a command writes. It gets its name when it is complete, and never replaces another file.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

/// Deleted on drop, unless it was kept.
pub struct NewFile {
    path: PathBuf,
    /// In the same folder, so that a rename is enough.
    partial: PathBuf,
}

impl NewFile {
    /// # Errors
    /// `AlreadyExists` if the name is taken, also by a dangling link.
    pub fn create(path: &Path) -> io::Result<Self> {
        if path.symlink_metadata().is_ok() {
            return Err(Errno::EXIST.into());
        }
        let mut partial = path.as_os_str().to_owned();
        partial.push(format!(".partial-{:08x}", fastrand::u32(..)));
        let partial = PathBuf::from(partial);
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial)?;
        Ok(Self { path: path.to_owned(), partial })
    }

    /// The path of the file until it is kept.
    pub fn partial(&self) -> &Path {
        &self.partial
    }

    /// Gives the file its name, durably.
    ///
    /// # Errors
    /// `AlreadyExists` if another file has taken the name meanwhile.
    pub fn keep(self) -> io::Result<()> {
        File::open(&self.partial)?.sync_all()?;
        match renameat_with(CWD, &self.partial, CWD, &self.path, RenameFlags::NOREPLACE) {
            // Some file systems, such as NFS, have no such rename, but they have links.
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => std::fs::hard_link(&self.partial, &self.path)?,
            renamed => renamed?,
        }
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        // Already gone if it was kept. Nothing can be done about another failure.
        drop(std::fs::remove_file(&self.partial));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn it_has_its_name_when_it_is_kept_and_is_gone_when_it_is_not() {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("file");
        drop(NewFile::create(&path).unwrap());
        assert_eq!(names(folder.path()), [""; 0]);
        let file = NewFile::create(&path).unwrap();
        std::fs::write(file.partial(), "whole").unwrap();
        assert!(!path.exists());
        file.keep().unwrap();
        assert_eq!((names(folder.path()), std::fs::read(&path).unwrap()), (vec!["file".to_owned()], b"whole".to_vec()));
    }

    #[test]
    fn a_name_that_is_taken_before_or_meanwhile_stays_whose_it_is() {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("file");
        let file = NewFile::create(&path).unwrap();
        std::fs::write(&path, "mine").unwrap();
        assert_eq!(file.keep().unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(NewFile::create(&path).err().unwrap().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!((names(folder.path()), std::fs::read(&path).unwrap()), (vec!["file".to_owned()], b"mine".to_vec()));
    }
}
