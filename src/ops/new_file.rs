//! A file that a command writes: it has its name only when it is whole, and never takes the name of another one.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

/// Goes again unless it is kept.
pub struct NewFile {
    path: PathBuf,
    /// Beside it, so that a rename will do.
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

    /// Where it is until it is kept.
    pub fn partial(&self) -> &Path {
        &self.partial
    }

    /// Gives it its name, on the disk as well.
    ///
    /// # Errors
    /// `AlreadyExists` if somebody else has taken the name meanwhile.
    pub fn keep(self) -> io::Result<()> {
        File::open(&self.partial)?.sync_all()?;
        match renameat_with(CWD, &self.partial, CWD, &self.path, RenameFlags::NOREPLACE) {
            // Not every file system has it, as NFS; those have links.
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => std::fs::hard_link(&self.partial, &self.path)?,
            renamed => renamed?,
        }
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        // Already gone if it was kept, and nothing to be done about any other failure.
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
